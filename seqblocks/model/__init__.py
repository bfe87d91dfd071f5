"""The model that `build` returns."""
