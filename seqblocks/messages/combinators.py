"""Faults of repeat, scan, parallel, residual and experts."""

from __future__ import annotations
