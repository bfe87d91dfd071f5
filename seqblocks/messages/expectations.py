"""Faults of `expect:`: figures that the model does not have."""

from __future__ import annotations
