"""Count what a model would launch on a GPU, for each token of a stream and for a training step, without a GPU.

Host code runs unchanged, on CPU tensors, with Triton selected and a simulated architecture. A recorder counts the
Triton kernels instead of running them, so results are meaningless; a dispatch mode counts operations of torch. An
operation that only makes a view or allocates launches nothing. Any other counts as one launch, although some are
several on a device (sorting, the gradient of an embedding). The cost of a layer is the difference of models of two
depths.

    python -m tests.triton.launch_counts            all models, as JSON
    python -m tests.triton.launch_counts NAME       the operations of one, by name
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import seqblocks
from seqblocks.kernels import triton_common, use_backend
from seqblocks.kernels.dispatch import custom_op

ARCH = "sm_90"
SLSTM = """
seqblocks: 1
use: [xlstm]
let: {dim: 64, depth: 2}
model:
  input: {tokens: 64}
  steps:
    - embed: {features: dim}
    - repeat: {name: layers, times: depth, steps: [slstm_block: {dim: dim, heads: 4}]}
    - rms_norm: {name: norm}
    - unembed: {bias: false, tie: embed}
"""
MODELS = ("mamba_small", "mlstm_small", "slstm")
NOT_LAUNCHED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view")
SMALL = {"dim": 64, "vocabulary": 64}


class Counts(NamedTuple):
    """Launches by name: kernels of Triton, operations of torch."""

    triton: Counter[str]
    torch: Counter[str]

    def total(self) -> list[int]:
        return [self.triton.total(), self.torch.total()]


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _launches(func):
            self._found[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _launches(func: Any) -> bool:
    """Return whether an operation computes tensors, other than making a view or allocating."""
    if func._schema.name.removeprefix("aten::") in NOT_LAUNCHED:
        return False
    tensors = [each.alias_info for each in func._schema.returns if "Tensor" in str(each.type)]
    return any(alias is None or alias.is_write for alias in tensors)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Select Triton, and count launches instead of running them."""
    counts = Counts(Counter(), Counter())

    def launch(kernel: triton_common.Kernel, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: counts.triton.update([kernel.function.__name__])

    with (
        mock.patch.object(triton_common, "arch", return_value=ARCH),
        mock.patch.object(triton_common, "INTERPRETED", True),  # so that Triton accepts tensors on a CPU
        mock.patch.object(custom_op, "is_seen", return_value=False),
        mock.patch.object(triton_common.Kernel, "__getitem__", launch),
        use_backend("triton"),
        _Operations(counts.torch),
    ):
        yield counts


def built(name: str, depth: int) -> seqblocks.SequenceModel:
    if name == "slstm":
        return seqblocks.build_text(SLSTM, set={"depth": depth})
    return seqblocks.build(name, set=SMALL | {"depth": depth}, seed=0)


def of_step(name: str, depth: int) -> Counts:
    """Count a token of a stream."""
    model = built(name, depth).eval()
    state, tokens = model.init_state(2), torch.zeros(2, dtype=torch.long)
    with counting() as counts, torch.no_grad():  # inference mode would not decompose composite operations
        model.step(tokens, state)
    return counts


def of_training(name: str, depth: int) -> Counts:
    """Count a forward and backward pass over two sequences, without loss and optimiser."""
    model = built(name, depth).train()
    with counting() as counts:
        y = model(torch.zeros(2, 64, dtype=torch.long))
        y.backward(y.detach())
    return counts


KINDS = {"step": of_step, "training": of_training}


def table() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return {model: {kind: {"layer", "rest": [Triton kernels, operations of torch]}}}."""
    found: dict[str, dict[str, dict[str, list[int]]]] = {}
    for name in MODELS:
        found[name] = {}
        for kind, count in KINDS.items():
            one, two = count(name, 1).total(), count(name, 2).total()
            layer = [b - a for a, b in zip(one, two, strict=True)]
            found[name][kind] = {"layer": layer, "rest": [a - b for a, b in zip(one, layer, strict=True)]}
    return found


def main(words: list[str]) -> None:
    if not words:
        print(json.dumps(table(), indent=1))
    for name in words:
        for kind, count in KINDS.items():
            one, two = count(name, 1), count(name, 2)
            print(name, kind, "of a layer:", two.triton - one.triton, two.torch - one.torch)


if __name__ == "__main__":
    main(sys.argv[1:])
