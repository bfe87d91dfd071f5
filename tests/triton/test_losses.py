"""A loss that contains only some of what a scan returns: the rest adds nothing to any gradient."""

from __future__ import annotations

from typing import Any

import pytest

from seqblocks.kernels import centaurus, selective_scan
from tests.triton import test_centaurus, test_mlstm, test_selective_scan, test_slstm
from tests.triton.compare import check, float32_bar, interpreted

pytestmark = interpreted

SCANS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "mlstm": (test_mlstm.run, test_mlstm.inputs(1, 70, 1, 4, 4, state=True), test_mlstm.GRADIENT),
    "slstm": (test_slstm.run, test_slstm.inputs(2, 5, 1, 4, state=True), 8 * float32_bar(5)),
    "selective_scan": (
        lambda **given: selective_scan(**given, return_state=True), test_selective_scan.tensors(S=5), float32_bar(5)
    ),
    "centaurus": (
        lambda **given: centaurus(**given, mode="dws", return_state=True), test_centaurus.inputs("dws", state=True),
        8 * float32_bar(9),
    ),
}
OUTPUTS = {"mlstm": 4, "slstm": 5, "selective_scan": 2, "centaurus": 2}


@pytest.mark.parametrize(("op", "at"), [(op, at) for op, n in OUTPUTS.items() for at in range(n)])
def test_of_one_output(op: str, at: int) -> None:
    scan, tensors, bar = SCANS[op]
    check(lambda **given: scan(**given)[at], tensors, bar)
