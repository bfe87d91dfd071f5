"""The graph as people read it: counts, costs, summaries, the language reference, the editor schema."""
