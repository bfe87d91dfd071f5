"""Nodes of a graph as torch modules: allocation, initialisation, calls, fusion."""
