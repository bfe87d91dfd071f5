"""Faults of checkpoint maps: layouts, recipes, patterns and names of parameters."""

from __future__ import annotations
