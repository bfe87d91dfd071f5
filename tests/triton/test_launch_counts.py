"""Launches of a token and of a training step, counted without a device: the table in docs/kernels/launches.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks.kernels import linear_attention, mlstm
from seqblocks.kernels.linear_attention.triton import launch as linear_attention_launch
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


def inputs(kind: str) -> dict[str, torch.Tensor]:
    B, S, H, D = 2, 256, 2, 64
    x = {name: torch.zeros(B, S, H, D, dtype=torch.bfloat16, requires_grad=True) for name in "qkv"}
    if kind == "mlstm":
        return x | {name: torch.zeros(B, S, H) for name in "if"}
    x["decay"] = torch.zeros(B, S, H, *((D,) if "key" in kind else ()))
    return x | ({"beta": torch.zeros(B, S, H)} if "delta" in kind else {})


@pytest.mark.parametrize("kind", ["mlstm", "head", "key", "delta head", "delta key"])
def test_resets_take_at_most_four_operations_forward_and_backward(kind: str) -> None:
    def counted(resets: torch.Tensor | None) -> list[int]:
        call: Any = mlstm if kind == "mlstm" else linear_attention
        with launch_counts.counting() as counts:
            y = call(**inputs(kind), resets=resets)
            forward = sum(counts.total())
            y.backward(y.detach())
        return [forward, sum(counts.total()) - forward]

    without, having = counted(None), counted(torch.zeros(2, 256, dtype=torch.bool))
    assert [b - a for a, b in zip(without, having, strict=True)] == [4, 4]


@pytest.mark.parametrize("kind", ["head", "key", "delta head", "delta key"])
def test_the_backward_pass_computes_no_pairs_of_tokens_again(kind: str) -> None:
    """What it needs of them is kept, in the dtype of the inputs, unless there is no backward pass."""
    kept: list[torch.Tensor] = []
    given, (B, S, H, D) = inputs(kind), (2, 256, 2, 64)
    with launch_counts.counting() as counts, torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        y = linear_attention(**given)
        y.backward(y.detach())
    of_pairs = ("pairs", "invert", "solve") if "delta" in kind else ("pairs",) if kind == "key" else ()
    assert {name: counts.triton[name] for name in ("pairs", "invert", "solve")} == {
        name: int(name in of_pairs) for name in ("pairs", "invert", "solve")
    }
    squares = [x for x in kept if x.shape == (B * H, S, D)]  # a chunk has D tokens
    assert all(x.dtype == torch.bfloat16 for x in squares)
    assert len(squares) == {0: 0, 1: 1, 3: 4}[len(of_pairs)]  # weights; A, the inverse, and its product with the keys
    with launch_counts.counting(), torch.no_grad():
        tensors = linear_attention_launch.chunks(
            *(given.get(name) for name in ("q", "k", "v", "decay", "beta")), None, None, None, False, 1.0, False)
    assert tensors[6].numel() == 0  # A
