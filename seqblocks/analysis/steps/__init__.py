"""Lower steps: each step of a spec becomes a node of the graph."""
