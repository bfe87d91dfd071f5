"""Faults of steps: verbs, keys, names, conditions, and what they define."""

from __future__ import annotations
