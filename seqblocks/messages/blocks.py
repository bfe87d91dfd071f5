"""Faults of blocks: their arguments, `use:`, and steps passed to them."""

from __future__ import annotations
