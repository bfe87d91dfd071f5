"""Faults of the text: YAML, its dialect, and positions of keys."""

from __future__ import annotations
