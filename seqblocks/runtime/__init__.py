"""The graph as torch modules: building, initialising, calling, fusing."""
