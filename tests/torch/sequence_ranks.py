"""Ranks for the tests of sequence parallelism: gloo processes, forked from one that imports torch once.

Each rank runs a model alone on the whole sequence, then on its part together with the others, and compares.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from seqblocks.distributed.sequence import SequenceParallel
from seqblocks.model.sequence_model import SequenceModel, has_tokens
from seqblocks.testing import _by_name, _output_types, _weights, random_context, random_input

TIMEOUT = 200  # seconds, after which ranks that still wait for one another are terminated
SHARES = {2: (5, 18), 3: (4, 11, 8)}  # frames of the sequence on each rank
Errors = dict[str, float]


def run_ranks(module: str, name: str, folder: Path, size: int) -> list[Any]:
    """Return the result of a function of a module, called without arguments, on each of that many ranks."""
    root = Path(__file__).resolve().parents[2]
    folder = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "tests.torch.sequence_ranks", module, name, str(folder), str(size)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def larger(model: SequenceModel) -> SequenceModel:
    """Return the model with larger weights. Some maps start at zero, which would hide errors in their inputs."""
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype) * 0.3)
    return model.eval()


class Example:
    """An input of a model, its outputs for the whole sequence, a loss and the gradients."""

    def __init__(self, model: SequenceModel, shares: tuple[int, ...], seed: int = 0, marks: bool = True) -> None:
        self.model, self.types = model, _output_types(model)
        self.edges = [0, *(model.frame_size * count for count in accumulate(shares))]
        self.x = random_input(model, 2, self.edges[-1], seed).detach()
        self.context = random_context(model, 2, seed)
        self.resets = self._marks() if marks and model.resets_obstacle is None else None
        model.zero_grad()
        self.y = _by_name(model(self.x, resets=self.resets, **self.context))
        self.y = {name: y.double() for name, y in self.y.items()}  # also the embedding of token ids
        self.weights = {name: _weights(y) for name, y in self.y.items()}
        loss = torch.stack([(y * self.weights[name]).mean() for name, y in self.y.items()]).sum()
        if loss.requires_grad:
            loss.backward()
        self.loss = loss.item()
        self.gradients = [p.grad for p in model.parameters()]

    def _marks(self) -> Tensor:
        """Return marks at the first tokens of sequences, including the boundaries of a part."""
        marks = torch.zeros(2, self.edges[-1], dtype=torch.bool)
        marks[0, [3, self.edges[1]]] = True
        marks[1, [self.edges[1] - 1, self.edges[-1] - 1]] = True
        return marks

    def compare(self, parallel: SequenceParallel) -> Errors:
        """Run this rank's part. Return the largest differences, relative to the largest value of a tensor or 1."""
        first, last = self.edges[parallel.rank : parallel.rank + 2]
        self.model.zero_grad()
        resets = None if self.resets is None else self.resets[:, first:last]
        found = _by_name(parallel(self.x[:, first:last], resets=resets, **self.context))
        losses, output = [], 0.0
        for name, y in found.items():
            if has_tokens(self.types[name]):
                own = slice(first // self.types[name].rate, last // self.types[name].rate)
                losses.append(parallel.mean(y * self.weights[name][:, own]))
                output = max(output, relative(y, self.y[name][:, own]))
            else:
                y = parallel.last(y)
                losses.append((y * self.weights[name]).mean())
                output = max(output, relative(y, self.y[name]))
        loss = torch.stack(losses).sum()
        if loss.requires_grad:
            loss.backward()
        parallel.sum_gradients()
        largest = max((g.abs().max().item() for g in self.gradients if g is not None), default=0.0)
        gradient = 0.0
        for p, expected in zip(self.model.parameters(), self.gradients, strict=True):
            assert p.grad is not None or expected is None
            if p.grad is not None:  # a start that no output depends on gets zeros from the later rank, else nothing
                difference = p.grad if expected is None else p.grad - expected
                gradient = max(gradient, difference.abs().max().item() / max(1.0, largest))
        return {"output": output, "loss": abs(loss.item() - self.loss) / max(1, abs(self.loss)), "gradient": gradient}


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value or 1."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def _on_rank(module: str, name: str, folder: str, size: int, rank: int) -> int:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        found = getattr(importlib.import_module(module), name)()
    except Exception:
        print(f"rank {rank}:", traceback.format_exc(), flush=True)
        return 1
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
    return 0


def main(module: str, name: str, folder: str, size: str) -> int:
    """Fork the ranks, and return 0 if none failed. If one fails, terminate the others, which may be waiting for it."""
    importlib.import_module(module)
    children = []
    for rank in range(int(size)):
        child = os.fork()
        if not child:
            os._exit(_on_rank(module, name, folder, int(size), rank))
        children.append(child)
    while children:
        done, status = os.wait()
        children.remove(done)
        if status:
            for child in children:
                os.kill(child, 9)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
