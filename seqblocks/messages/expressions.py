"""Faults of expressions: their syntax, names, functions and values."""

from __future__ import annotations
