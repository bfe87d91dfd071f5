"""Read or complete a finished graph: lookahead, unused parameters, kept context, `expect:`."""
