"""Describe graphs and the language: listings, summaries, the language reference, the editor schema."""
