"""Parse YAML specs: the YAML dialect with source positions, expressions, the typed spec, overrides, error codes."""
