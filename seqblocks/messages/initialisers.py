"""Faults of `init:` and `tie:`."""

from __future__ import annotations
