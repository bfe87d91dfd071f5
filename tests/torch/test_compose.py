"""Random specs, composed to be right (tests/compose.py): what is accepted is built, runs, and keeps what was checked.

    every step gives the shape that was checked;
    whole = chunks = steps, where the summary says that the model streams, with resets too;
    no output changes with tokens further ahead than declared;
    the parameters are those counted.

float64; differences are rounding of some hundreds of operations on values that are held below 1e4, about 1e-10, so 1e-9
of the largest value leaves a digit. What is rejected is rejected with diagnostics.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.errors import SpecError
from seqblocks.report import listing
from seqblocks.report.summary import summarise
from seqblocks.runtime.model import SequenceModel
from seqblocks.runtime.primitive import Primitive
from seqblocks.testing import check_law, check_lookahead, check_shapes, random_input
from tests.compose import compose
from tests.mutate import mutated


def judge(text: str, seed: int) -> bool:
    """Whether the spec is accepted; AssertionError, or whatever it raises, if it does not hold what was checked.

    A spec may bound what a run holds, by the length of its positions or a cache: longer input is then refused.
    """
    try:
        return held(text, seed)
    except seqblocks.RunError as error:
        if re.search(r"is past the \d+ of position_embed|its cache holds", str(error)):
            return True
        raise


def held(text: str, seed: int) -> bool:
    try:
        _, checked = check.load_text(text)
    except SpecError as error:
        faults = error.diagnostics
    else:
        faults = ()
    if faults:
        return False
    assert checked is not None
    found = summarise(checked)
    assert listing.text(checked)
    model = seqblocks.build_text(text, dtype=torch.float64, seed=seed).eval()
    assert sum(p.numel() for p in model.parameters()) == found.params
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
            assert torch.isfinite(parameter).all()
    moderate(model, seed)
    chance = random.Random(seed)
    length = chance.randint(1, 12 if model.frame_size == 1 else 3)
    if isinstance(checked.input.length, int):
        length = checked.input.length // model.frame_size
    if found.streams is None and length:
        resets = [(chance.randrange(2), chance.randrange(length)) for _ in range(2)] if model.frame_size == 1 else []
        cuts = sorted({chance.randint(1, length - 1) for _ in range(2)}) if length > 1 else []
        check_law(model, seq=length, cuts=cuts, seed=seed, tolerance=1e-9)
        if resets and resettable(model):
            check_law(model, seq=length, cuts=cuts, resets=resets, seed=seed, tolerance=1e-9)
    else:
        check_shapes(model, seq=length, seed=seed)
        check_lookahead(model, seq=length, seed=seed, tolerance=1e-9)
        if length > 1 and resettable(model):
            check_pieces(model, length, seed)
    return True


def moderate(model: SequenceModel, seed: int) -> None:
    """Shrink the parameters until no step makes numbers above 1e4: products of products overflow float64 soon."""
    largest = [0.0]

    def look(_module: Any, _inputs: Any, given: Any) -> None:
        y = given[0]
        largest[0] = max(largest[0], y.abs().max().nan_to_num(torch.inf).item() if y.numel() else 0.0)

    length = model.spec.input.length
    x = random_input(model, 2, length if isinstance(length, int) else 6 * model.frame_size, seed)
    hooks = [step.register_forward_hook(look) for step in model.modules() if isinstance(step, Primitive)]
    for _ in range(8):
        largest[0] = 0.0
        with torch.no_grad():
            model(x)
            if largest[0] < 1e4:
                break
            for parameter in model.parameters():
                parameter.mul_(0.5)
    for hook in hooks:
        hook.remove()


def check_pieces(model: SequenceModel, length: int, seed: int) -> None:
    """Assert that a model that cannot stream, as it goes both ways, gives of two packed sequences what each gives."""
    x, cut = random_input(model, 1, length, seed), 1 + seed % (length - 1)
    with torch.no_grad():
        packed = model(x, cu_seqlens=torch.tensor([0, cut, length]))
        alone = torch.cat([model(x[:, :cut]), model(x[:, cut:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9 * max(1.0, alone.abs().max().item()))


def resettable(model: SequenceModel) -> bool:
    """Whether pieces on their own are what a reset gives: no vector, which is of the last piece, and no step that has
    no beginning of sequences, such as one over an image or a window."""
    output = model.spec.output
    verbs = {node.verb for node in graph.walk(model.graph)}
    orders = {order for node in graph.walk(model.graph) if node.kind == "scan" for order in node.arguments.orders}
    alone = verbs & {"pool", "conv2d", "class_token", "to_image", "patch_embed", "downsample", "upsample"}
    alone |= verbs & {"rearrange", "reduce", "conv1d", "conv_transpose1d"}
    flat = model.spec.input.grid is None
    return flat and output is not None and output.kind == "sequence" and not alone and orders <= {"forward", "reverse"}


@pytest.mark.parametrize("part", range(4))
def test_composed_specs(part: int) -> None:
    accepted = sum(judge(compose(seed), seed) for seed in range(40 * part, 40 * (part + 1)))
    assert accepted >= 36  # of 40


@pytest.mark.parametrize("part", range(2))
def test_mutated_specs(part: int) -> None:
    """One thing in a spec is replaced by another: rejected, or as good as any other."""
    accepted = sum(judge(mutated(compose(seed), seed), seed) for seed in range(60 * part, 60 * (part + 1)))
    assert 0 < accepted < 60


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_composed_specs(part: int) -> None:
    start = 10_000 + 200 * part
    accepted = sum(judge(compose(seed), seed) for seed in range(start, start + 200))
    assert accepted >= 180
    for seed in range(start, start + 200):
        judge(mutated(compose(seed), seed), seed)
