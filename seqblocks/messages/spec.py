"""Faults of the keys of a file: versions, `use:`, `let:`, blocks, names and overrides."""

from __future__ import annotations
