"""The number of calls, and of their files, between a step and its node stays small, so that readers can follow them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import seqblocks
from seqblocks.analysis import check
from seqblocks.analysis.steps import steps

ROOT = Path(seqblocks.__file__).parent
TEXT = """
seqblocks: 1
model:
  input: {features: 64}
  steps:
    - linear: {features: 64, as: q}
    - linear: {features: 64, as: k}
    - linear: {features: 64, as: v}
    - linear: {features: 4, as: i}
    - linear: {features: 4, as: f}
    - mlstm: {q: q, k: k, v: v, i: i, f: f, heads: 4}
"""
MAX_CALLS = 45
MAX_CHANGES = 8  # changes of file from one call to the next


@contextmanager
def recorded_calls(verb: str) -> Iterator[list[tuple[str, str]]]:
    """Record the file and name of each seqblocks function that runs while a step with this verb is lowered."""
    calls: list[tuple[str, str]] = []
    inside = False

    def record(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        if frame.f_code is steps.lower_step.__code__ and frame.f_locals["step"].verb == verb:
            inside = event != "return"
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_name
        # constructing or comparing values is no call, nor is a comprehension from Python 3.12 on
        special = name.startswith("__") or name in ("<listcomp>", "<dictcomp>", "<setcomp>")
        if event == "call" and inside and path.is_relative_to(ROOT) and not special:
            calls.append((str(path.relative_to(ROOT)), name))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_step_reaches_its_node_in_few_calls() -> None:
    check.load_text(TEXT)  # imports and cached results do not count
    with recorded_calls("mlstm") as calls:
        check.load_text(TEXT)
    path = "\n".join(f"{file}  {name}" for file, name in calls)
    assert calls[0] == ("analysis/steps/steps.py", "lower_step")
    assert ("ops/mlstm.py", "shape") in calls
    assert len(calls) <= MAX_CALLS, path
    assert sum(one[0] != other[0] for one, other in pairwise(calls)) <= MAX_CHANGES, path
