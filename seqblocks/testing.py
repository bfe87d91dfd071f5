"""The state law as a check that any spec, and any new primitive, can be put to:

    whole sequence = any split into chunks with carried state = step by step, in value and in gradient;
    with resets = each piece on its own.

And what a spec declares as checks: the shapes of every step, and how far an output looks ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.analysis import lookahead
from seqblocks.errors import RunError, UsageError
from seqblocks.runtime.model import SequenceModel
from seqblocks.runtime.primitive import Primitive
from seqblocks.state import declared
from seqblocks.types import Wire


def check_law(
    model: SequenceModel,
    *,
    seq: int = 23,
    batch: int = 2,
    cuts: Sequence[int] | None = None,
    resets: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Assert `check_shapes`, `check_lookahead` and the law for a model that streams (RunError for another).

    `tolerance` is relative to the largest value. Without one: 1e-9 for a float64 model, the one to check
    with, and half the digits of its dtype for another.

    cuts: where the sequence is cut into chunks, without them 1, 2 and 11 as far as it reaches; resets: (row, position)
    of tokens that begin a new sequence. A model that changes the rate of its tokens knows no resets; seq and cuts then
    count frames of `model.frame_size` tokens. UsageError for what lies outside the sequence.
    """
    model.init_state(batch)  # a model that cannot stream says why
    if seq < 1:
        raise UsageError(f"a sequence has a token or more, not {seq}")
    cuts = [cut for cut in (1, 2, 11) if cut < seq] if cuts is None else cuts
    outside = [cut for cut in cuts if not 0 < cut < seq]
    if outside:
        raise UsageError(f"a sequence of {seq} can be cut at 1 to {seq - 1}, not at {outside[0]}")
    stray = [mark for mark in resets if not (0 <= mark[0] < batch and 0 <= mark[1] < seq)]
    if stray:
        raise UsageError(f"resets are (row, position) in {batch} rows of {seq}, and {stray[0]} is not")
    if model.spec.input.kind == "image":
        raise RunError("the model reads images, and an image has no chunks: the law is one of sequences")
    check_shapes(model, seq=seq, batch=batch, seed=seed)
    check_lookahead(model, seq=seq, batch=batch, seed=seed, tolerance=tolerance)
    frame = model.frame_size
    x = random_input(model, batch, seq * frame, seed)
    tolerance = _tolerance(model) if tolerance is None else tolerance
    marks = torch.zeros(batch, seq * frame, dtype=torch.bool, device=x.device)
    for row, at in resets:
        marks[row, at * frame] = True
    given = marks if resets else None
    whole, last = model(x, return_state=True, resets=given)
    bounds = [c * frame for c in sorted({0, seq, *cuts})]
    for name, edges in (("chunks", bounds), ("steps", list(range(0, seq * frame + 1, frame)))):
        if name == "steps" and resets:
            found, state = _chunks(model, x, edges, marks)
        elif name == "steps":
            found, state = _steps(model, x)
        else:
            found, state = _chunks(model, x, edges, given)
        _close(f"{name}: output", found, whole, tolerance)
        _close_tree(f"{name}: state", state, last, tolerance)
        wanted = _gradients(model, whole, x)
        # a gradient in which large terms cancel, as that of a bias of keys, is no more exact than the terms were
        largest = max((g.double().abs().max().item() for g in wanted if g.numel()), default=0.0)
        for index, (a, b) in enumerate(zip(_gradients(model, found, x), wanted, strict=True)):
            _close(f"{name}: gradient {index}", a, b, tolerance, 1e-4 * largest)
    if resets and _has_tokens(model):
        _close("resets: pieces on their own", _pieces(model, x, marks), whole, tolerance)


def check_lookahead(
    model: SequenceModel, *, seq: int = 23, batch: int = 2, seed: int = 0, tolerance: float | None = None
) -> None:
    """Assert that no output changes with tokens further ahead of it than the model declares (`lookahead.find`).

    seq: of frames, as in `check_law`, where the spec leaves the length open. Nothing is to be checked of a model that
    reads images, gives a vector, or declares that it sees the whole sequence. Tokens from several positions on are
    drawn anew; the outputs that stand too early to see them must stay, up to `tolerance` of the largest value.
    """
    ahead = lookahead.find(model.spec)
    if ahead is None or ahead.tokens == lookahead.WHOLE:
        return
    tolerance = _tolerance(model) if tolerance is None else tolerance
    length = model.spec.input.length
    seq = length if isinstance(length, int) else seq * model.frame_size
    every = model.spec.output.every if model.spec.output else 1
    with torch.no_grad():
        x, other = (random_input(model, batch, seq, seed + at).detach() for at in (0, 1))
        before = model(x)
        first = int(ahead.tokens) + 1  # what comes before it every output may see
        for start in sorted({first + (seq - 1 - first) * part // 6 for part in range(7)} if first < seq else ()):
            kept = -(-(start - int(ahead.tokens)) // every)  # of the outputs: those before start - lookahead
            after = model(torch.cat([x[:, :start], other[:, start:]], 1))
            what = f"lookahead {lookahead.shown(ahead.tokens)}: outputs before token {start} of the input"
            _close(what, after[:, :kept], before[:, :kept], tolerance)


def _tolerance(model: SequenceModel) -> float:
    dtype = dtype_of(model)
    return 1e-9 if dtype == torch.float64 else torch.finfo(dtype).eps ** 0.5


def _has_tokens(model: SequenceModel) -> bool:
    """Whether its output has something for each token (or window): neither a vector nor an image."""
    return model.spec.output is not None and model.spec.output.kind in ("sequence", "tokens")


def check_shapes(model: SequenceModel, *, seq: int = 23, batch: int = 2, seed: int = 0) -> None:
    """Assert that every step gives the shape that was checked, and carries the state it declares, for any model.

    seq: of frames, as in `check_law`, where the spec leaves the length open.
    """
    length = model.spec.input.length
    seq = length if isinstance(length, int) else seq * model.frame_size
    streams = model._obstacle is None

    def watch(name: str, step: nn.Module, wire: Wire) -> Any:
        def look(_module: Any, _inputs: Any, given: tuple[Any, Any]) -> None:
            y, state = given
            axes = [seq // wire.every if isinstance(axis, str) else axis for axis in wire.axes[1:]]
            _is_shaped(f"{name}: output", y, [batch, *axes])
            if streams and isinstance(step, Primitive):
                kept: Any = reduce(lambda tree, part: tree.get(part, {}), name.split("."), declared(model.graph))
                assert isinstance(state, dict), f"{name}: state: {type(state).__name__} is no dict"
                assert set(state) == set(kept), f"{name}: state: {sorted(state)} is not {sorted(kept)}, as declared"
                for key, item in kept.items():
                    _is_shaped(f"{name}: state {key}", state[key], [batch, *item.shape])

        return step.register_forward_hook(look)

    # a scan whose orders own parameters cannot be hooked (its `forward` may be a child); what is inside it can
    typed = [(name, step, step.__dict__.get("_type")) for name, step in model.named_modules()]
    hooks = [watch(name, step, wire) for name, step, wire in typed if wire]
    try:
        with torch.no_grad():
            model(random_input(model, batch, seq, seed), return_state=streams)
    finally:
        for hook in hooks:
            hook.remove()


def _is_shaped(what: str, found: Any, wanted: list[int]) -> None:
    assert isinstance(found, Tensor), f"{what}: {type(found).__name__} is no tensor"
    assert list(found.shape) == wanted, f"{what}: {list(found.shape)} is not {wanted}, as declared"


def random_input(model: SequenceModel, batch: int, seq: int, seed: int = 0) -> Tensor:
    """An input of the kind the model reads: token numbers, or features drawn from N(0, 1) that require gradients.

    An image is of the spec's size, whatever `seq` is.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    wire = model.spec.input
    some = model._some_tensor()
    if wire.kind == "tokens":
        return torch.randint(wire.features, (batch, seq), generator=generator, device="cpu").to(some.device)
    shape = (batch, wire.features, *(wire.grid or ())) if wire.kind == "image" else (batch, seq, wire.features)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(some.device, dtype_of(model)).requires_grad_()


def dtype_of(model: SequenceModel) -> torch.dtype:
    """What a model computes in."""
    return model._own_dtype()


def _chunks(model: SequenceModel, x: Tensor, edges: Sequence[int], marks: Tensor | None) -> tuple[Tensor, Any]:
    parts, state = [], None
    for a, b in pairwise(edges):
        here = None if marks is None else marks[:, a:b]
        y, state = model(x[:, a:b], state=state, return_state=True, resets=here)
        parts.append(y)
    return _joined(model, parts), state


def _steps(model: SequenceModel, x: Tensor) -> tuple[Tensor, Any]:
    parts, state = [], model.init_state(x.shape[0])
    one = model.frame_size == 1
    for t in range(0, x.shape[1], model.frame_size):
        y, state = model.step(x[:, t] if one else x[:, t : t + model.frame_size], state)
        parts.append(y.unsqueeze(1) if one and _has_tokens(model) else y)
    return _joined(model, parts), state


def _joined(model: SequenceModel, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1) if _has_tokens(model) else parts[-1]  # a pooled model answers for the last token


def _pieces(model: SequenceModel, x: Tensor, marks: Tensor) -> Tensor:
    rows = []
    for row in range(x.shape[0]):
        edges = sorted({0, x.shape[1], *torch.nonzero(marks[row]).flatten().tolist()})
        parts = [model(x[row : row + 1, a:b]) for a, b in pairwise(edges)]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def _gradients(model: SequenceModel, y: Tensor, x: Tensor) -> list[Tensor]:
    if not y.requires_grad:  # token numbers
        return []
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    found = torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _close_tree(what: str, found: Any, wanted: Any, tolerance: float) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), f"{what}: {sorted(found)} is not {sorted(wanted)}"
        for key, value in wanted.items():
            _close_tree(f"{what}.{key}", found[key], value, tolerance)
    else:
        _close(what, found, wanted, tolerance)


def _close(what: str, found: Tensor, wanted: Tensor, tolerance: float, least: float = 1.0) -> None:
    assert found.shape == wanted.shape, f"{what}: {list(found.shape)} is not {list(wanted.shape)}"
    if not wanted.numel():
        return
    error = (found.double() - wanted.double()).abs().max().item()
    scale = max(1.0, least, wanted.double().abs().max().item())
    assert error <= tolerance * scale, f"{what}: differs by {error:.3g}, more than {tolerance:g} of {scale:.3g}"
