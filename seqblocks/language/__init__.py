"""Text to declarations: the YAML dialect with positions, expressions, the typed spec, overrides, fault codes."""
