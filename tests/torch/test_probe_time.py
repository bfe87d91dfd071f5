"""A training of `seqblocks probe` ends before its time is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import seqblocks
from seqblocks.probes import TASKS, probe, training

SPEC = """seqblocks: 1
model: {input: {tokens: 2}, steps: [{embed: 8}, silu, {linear: 2}]}
"""


def test_training_ends_before_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take 0.3 s end within a budget of 8 s, and use nine tenths of it."""
    now = 0.0

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments)

        return run

    short = replace(TASKS["parity"], lengths=(40, 80))
    monkeypatch.setattr("seqblocks.probes.training.step", slow(training.step, 0.3))
    monkeypatch.setattr("seqblocks.training.clock.time", SimpleNamespace(perf_counter=lambda: now))
    _, spec = seqblocks.load_text(SPEC)
    results = probe(spec, short, seconds=8.0)
    assert results[0].cut
    assert 7.2 < now <= 8.0
    assert results[0].seconds == pytest.approx(now)
