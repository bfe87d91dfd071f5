"""Launches of a token and of a training step, counted without a device: the table in docs/kernels/launches.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.triton import launch_counts

pytestmark = pytest.mark.skipif(launch_counts.triton_common.MISSING != "", reason="Triton is not installed")


def lines(table: dict[str, dict[str, dict[str, list[int]]]]) -> list[str]:
    """Return the rows of the page: Triton kernels + operations of torch, for a layer and for everything around the
    layers."""
    return [
        f"| `{name}` | {kind} | {layer[0]} + {layer[1]} | {rest[0]} + {rest[1]} |"
        for name, kinds in table.items()
        for kind, (layer, rest) in ((kind, (found["layer"], found["rest"])) for kind, found in kinds.items())
    ]


def test_the_table_is_what_is_counted(root: Path, update_golden: bool) -> None:
    golden, page = root / "tests/golden/triton_launches.json", root / "docs/kernels/launches.md"
    found = launch_counts.table()
    if update_golden:
        golden.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text = page.read_text(encoding="utf-8").splitlines()
        at = [number for number, line in enumerate(text) if line.startswith("| `")]
        page.write_text("\n".join([*text[: at[0]], *lines(found), *text[at[-1] + 1 :]]) + "\n", encoding="utf-8")
    assert found == json.loads(golden.read_text(encoding="utf-8"))
    assert set(lines(found)) <= set(page.read_text(encoding="utf-8").splitlines())


def test_views_and_allocations_are_no_launches() -> None:
    with launch_counts.counting() as counts:
        x = torch.empty(4, 6)
        x.view(6, 4).t()[1:].unsqueeze(0).expand(2, 3, 6).detach()
        assert counts.total() == [0, 0]
        x.add_(1.0).t().contiguous()
    assert dict(counts.torch) == {"add_": 1, "clone": 1}
