"""Tools for choosing among designs: compare specs, fit one to a budget. Nothing here imports torch."""
