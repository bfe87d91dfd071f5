"""Faults of the values of arguments."""

from __future__ import annotations
