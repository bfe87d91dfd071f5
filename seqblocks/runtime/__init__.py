"""Build graphs as torch modules: allocation, initialisation, calls, fusion, generation."""
