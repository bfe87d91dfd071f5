"""Warnings and faults of what has no effect: steps, inputs, overrides, order."""

from __future__ import annotations
