"""Check that an accepted random spec (tests/compose.py) builds, runs, and has the analysed properties.

- Every step returns the shape that was checked.
- Whole = chunks = steps if the summary says that the model streams, also with resets.
- No output depends on tokens further ahead than the declared lookahead.
- A call does not change the state passed to it.
- The parameters are those counted.
- Steps that share parameters compute the same as steps with copies, and their gradients add up.

All in float64. Some hundreds of operations on values below 1e4 (`LARGEST`) have rounding errors of about 1e-10, so the
tolerance of 1e-9 of the largest value leaves a factor of ten. Models with larger values are not compared. Rejected
specs must be rejected with diagnostics.
"""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.descriptions import listing
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import SpecError
from seqblocks.kernels.attention.scores import NOTHING
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.primitive import Primitive
from seqblocks.runtime.torch_modules import all_primitives
from seqblocks.testing import check_law, check_lookahead, check_shapes, random_context, random_input
from tests.unshared import check_unshared

LARGEST = 1e4


def judge(text: str, seed: int, length: int | None = None) -> bool:
    """Return whether the spec is accepted. Raise AssertionError, or any other error, if the model breaks a property.

    length: of the input in frames, where the spec leaves it open; random by default. A spec may limit the length of a
    run, by the length of its positions or a cache: longer input is then refused.
    """
    try:
        return obeys_law(text, seed, length)
    except seqblocks.RunError as error:
        if re.search(r"is past the \d+ of position_embed|its cache has room for", str(error)):
            return True
        raise


def obeys_law(text: str, seed: int, length: int | None = None) -> bool:
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
    if found.streams is None and found.lookahead is not None:
        assert found.latency == found.frame_size - 1 >= int(found.lookahead), "what streams waits for a frame at most"
    assert listing.text(checked)
    model = seqblocks.build_text(text, dtype=torch.float64, seed=seed).eval()
    assert sum(p.numel() for p in model.parameters()) == found.params
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
            assert torch.isfinite(parameter).all()
    chance = random.Random(seed)
    length = length or chance.randint(1, 12 if model.frame_size == 1 else 3)
    tokens = length * model.frame_size
    if isinstance(checked.input.length, int):  # a grid may be smaller than a frame
        tokens = checked.input.length
        length = tokens // model.frame_size
    if not moderate(model, seed, length):
        return True  # rounding errors would be larger than the tolerance
    if tokens and any(node.shared for node in graph.walk(checked.graph)):
        check_unshared(model, tokens, seed)
    if found.streams is None and length:
        check_stream(model, length, chance, seed)
    else:
        check_shapes(model, seq=length, seed=seed)
        check_lookahead(model, seq=length, seed=seed, tolerance=1e-9)
        if length > 1 and resettable(model):
            check_pieces(model, length, seed)
    check_training(model, tokens, seed)
    return True


def check_training(model: SequenceModel, tokens: int, seed: int) -> None:
    """Assert that a call in training mode, where experts have a capacity, returns the same shapes and has gradients."""
    x = random_input(model, 2, tokens, seed)
    context = random_context(model, 2, seed, x.shape[1] if x.dim() > 1 else None)
    with torch.no_grad():
        expected = tree_map(lambda y: y.shape, model(x, **context))
    y = model.train()(x, **context)
    assert tree_map(lambda y: y.shape, y) == expected
    total = sum((each.square().sum() for each in tree_leaves(y) if each.requires_grad), torch.zeros(()))
    if total.requires_grad:
        total.backward()


def check_stream(model: SequenceModel, length: int, chance: random.Random, seed: int) -> None:
    """Assert the law, without and with resets, and that calls do not change states. length: in frames."""
    cuts = sorted({chance.randint(1, length - 1) for _ in range(2)}) if length > 1 else []
    check_law(model, seq=length, cuts=cuts, seed=seed, tolerance=1e-9)
    check_state_is_kept(model, length, seed)
    if model.frame_size == 1 and resettable(model):
        resets = [(chance.randrange(2), chance.randrange(length)) for _ in range(2)]
        check_law(model, seq=length, cuts=cuts, resets=resets, seed=seed, tolerance=1e-9)


def moderate(model: SequenceModel, seed: int, frames: int = 6) -> bool:
    """Shrink the parameters until no step makes numbers above 1e4, which rounding would keep from being compared.

    Return whether none does. A product of copies of the input may overflow whatever the parameters are.
    frames: of the input that is compared, whose length is open; numbers may grow with it.
    """
    largest = [0.0]

    def look(_module: Any, _inputs: Any, y: Any) -> None:
        y = y[y != NOTHING]  # attention to no key returns it whatever the parameters are, and merges turn it into 0
        largest[0] = max(largest[0], y.abs().max().nan_to_num(torch.inf, torch.inf).item() if y.numel() else 0.0)

    length = model.spec.input.length
    x = random_input(model, 2, length if isinstance(length, int) else max(frames, 1) * model.frame_size, seed)
    context = random_context(model, 2, seed, x.shape[1] if x.dim() > 1 else None)
    with all_primitives(model), torch.no_grad():
        hooks = [step.register_forward_hook(look) for step in model.modules() if isinstance(step, Primitive)]
        for _ in range(8):
            largest[0] = 0.0
            model(x, **context)
            if largest[0] < LARGEST:
                break
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for hook in hooks:
            hook.remove()
    return largest[0] < LARGEST


def check_pieces(model: SequenceModel, length: int, seed: int) -> None:
    """Assert that a bidirectional model, which cannot stream, processes two packed sequences like each alone."""
    x, cut = random_input(model, 1, length, seed), 1 + seed % (length - 1)
    context = random_context(model, 1, seed)
    with torch.no_grad():
        packed = model(x, cu_seqlens=torch.tensor([0, cut, length]), **context)
        alone = torch.cat([model(x[:, :cut], **context), model(x[:, cut:], **context)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9 * max(1.0, alone.abs().max().item()))


def check_state_is_kept(model: SequenceModel, length: int, seed: int) -> None:
    """Assert that a call changes no number of the state passed to it."""
    x = random_input(model, 2, length * model.frame_size, seed)
    with torch.no_grad():
        _, state = model(x, return_state=True, **random_context(model, 2, seed))
        before = tree_map(lambda part: part.clone(), state)
        model(x, state=state, return_state=True)
    torch.testing.assert_close(state, before, rtol=0, atol=0, equal_nan=True)


def resettable(model: SequenceModel) -> bool:
    """Return whether resets equal separate pieces: tokens are returned, and all steps accept resets.

    A grid has one size. A context with one token for each of the input is the same for all pieces.
    """
    output, grid = model.spec.output, model.spec.input.grid or model._share_lengths
    return output is not None and output.kind == "sequence" and not grid and graph.resets_obstacle(model.spec) is None
