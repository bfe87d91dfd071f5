"""`checkpoint:` maps: read them, check them against a graph, and translate names by them."""
