"""Faults of `share:`."""

from __future__ import annotations
