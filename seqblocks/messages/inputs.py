"""Faults of `input:`, `inputs:` and `outputs:`."""

from __future__ import annotations
