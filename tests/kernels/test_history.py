"""Results are a function of the call: what a process computed before does not change a bit of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels import mlstm, products
from tests.kernels.conformance import IMPLEMENTATIONS, SINGLE, Subject, draw, with_gradients
from tests.kernels.families import KERNELS

ROOT = Path(__file__).resolve().parents[2]

def of_kernels() -> dict[str, Tensor]:
    """Return outputs, last states and gradients of every kernel, and of the mLSTM with wide heads."""
    found = {}
    for kernel in KERNELS:
        subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["torch"])
        x = subject.leaves(subject.inputs(S=40), SINGLE[0])
        found |= {f"{kernel.name}: {name}": y for name, y in with_gradients(subject(x), x).items()}
    wide = {name: draw(1, 128, 1, 256, seed=at).float().requires_grad_() for at, name in enumerate("qkv")}
    wide |= {name: draw(1, 128, 1, seed=at).float().requires_grad_() for at, name in enumerate("if")}
    return found | {f"wide: {name}": y for name, y in with_gradients({"h": mlstm(**wide)}, wide).items()}


def of_model(model: seqblocks.SequenceModel) -> dict[str, Tensor]:
    """Return logits, gradients, and the logits of steps after a prompt."""
    tokens = torch.arange(300).remainder(64).unsqueeze(0)
    y = model(tokens)
    found = {"logits": y} | with_gradients({"y": y}, dict(model.named_parameters()))
    stream = model.stream(1)
    return found | {f"token {at}": stream.step(tokens[:, at]) for at in range(3)}


def other_shapes() -> None:
    """Multiply a thousand shapes by `linear`, and run the mLSTM with a hundred widths."""
    x, weight = torch.ones(1100, 256), torch.ones(256, 256)
    for tokens in range(100, 1100):
        products.linear(x[:tokens], weight)
    for width in range(160, 260):
        q, i = torch.ones(1, 128, 1, width), torch.ones(1, 128, 1)
        mlstm(q, q, q, i, i)


def of_both() -> dict[str, Tensor]:
    model = seqblocks.build("mamba_small", set={"dim": 256, "depth": 1}, device="cpu", seed=0)
    return of_kernels() | of_model(model)


CHILD = """
import sys, torch
from tests.kernels import test_history
torch.set_num_threads(int(sys.argv[2]))
torch.save(test_history.of_both(), sys.argv[1])
"""


@pytest.mark.slow
def test_no_bit_depends_on_what_a_process_computed_before(tmp_path: Path) -> None:
    """Compare with a new process, and with the same process before a thousand other shapes."""
    file = tmp_path / "fresh.pt"
    given = [str(file), str(torch.get_num_threads())]
    with subprocess.Popen([sys.executable, "-c", CHILD, *given], env=os.environ | {"PYTHONPATH": str(ROOT)}) as child:
        other_shapes()
        before = of_both()
        other_shapes()
        after = of_both()
        assert child.wait() == 0
    fresh = torch.load(file)
    assert fresh.keys() == before.keys() == after.keys()
    assert [name for name, y in fresh.items() if not torch.equal(y, before[name])] == []
    assert [name for name, y in fresh.items() if not torch.equal(y, after[name])] == []
