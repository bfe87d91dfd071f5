"""Lower each combinator: its steps become the bodies of its node. Each module is imported when a spec uses its verb."""
