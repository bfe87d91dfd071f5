"""`check` of the specs with most steps stays cheap: docs/decisions/0046-what-check-may-cost.md."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from seqblocks.analysis import check
from tests.sampled import slow

CALLS = {"ttt_small": 98_000, "falcon_h1_0_5b": 94_000, "nemotron_h_4b": 110_000, "vmamba_tiny": 116_000}
"""Of functions, also those written in C, in Python 3.11 with 5 % to spare. Instructions depend on the machine."""


@pytest.mark.parametrize("name", ["ttt_small", slow("falcon_h1_0_5b"), slow("nemotron_h_4b"), slow("vmamba_tiny")])
def test_calls(name: str) -> None:
    check.load_model(name)  # imports, and what is parsed once in a process, do not count
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        check.load_model(name)
    finally:
        sys.setprofile(before)
    assert calls <= CALLS[name]
