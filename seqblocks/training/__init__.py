"""A small trainer: for probes, and for trying a spec on a text or on arrays. It is no framework."""
