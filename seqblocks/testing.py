"""Test helpers for specs and primitives: check the state law, declared shapes, and declared lookahead.

The state law, which holds for every model that streams:

    whole sequence = any split into chunks with carried state = step by step, in value and in gradient;
    with resets = each sequence by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis.passes import lookahead
from seqblocks.errors import UsageError
from seqblocks.model.random_inputs import Context, open_context_length
from seqblocks.model.random_inputs import dtype_of as dtype_of
from seqblocks.model.random_inputs import random_context as random_context
from seqblocks.model.random_inputs import random_input as random_input
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.cell import Cell
from seqblocks.runtime.choose import Choose
from seqblocks.runtime.experts import Experts
from seqblocks.runtime.modules import StepModule, type_of
from seqblocks.runtime.primitive import Primitive
from seqblocks.runtime.torch_modules import all_primitives
from seqblocks.state import States, declared
from seqblocks.state_layout import State
from seqblocks.streaming.token_rows import has_tokens
from seqblocks.types import UNBOUNDED, Facts, Wire, names_of, size_of

Output = Any  # a tensor, or a dict of them where the spec names its outputs


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
    """Assert the state law, `check_shapes` and `check_lookahead` for a model that streams.

    The state law: a whole sequence, chunks and steps agree, and a call without tokens changes nothing.

    Inputs that do not stream are drawn once; gradients with respect to them are compared too.

    cuts: positions at which the sequence is split into chunks, by default 1, 2 and 11 if within the sequence. resets:
    (row, position) of tokens that begin a new sequence. For a model that changes the rate of its tokens, seq and cuts
    count frames of `model.frame_size` tokens, and there are no resets.

    tolerance: relative to the largest value of a tensor, or to 1 if all are smaller. Default: 1e-9 for a float64 model
    (recommended), else half the digits of the dtype. Gradients may also differ by `tolerance` * 1e-4 times the largest
    gradient of the model. This allows for gradients in which large terms cancel, such as that of the bias of keys:
    their rounding errors do not shrink with the sum. In float64, 1e-9 * 1e-4 is about 450 rounding errors, as many as
    a sum over the tokens of a test has; in lower precision it is less than one.

    Raises AssertionError if a check fails, RunError if the model cannot stream, and UsageError for positions outside
    the sequence or a model with dropout in training mode (call `model.eval()` first).
    """
    _check_model(check_law, model)
    context = random_context(model, batch, seed, seq * model.frame_size)
    model.init_state(batch, **context)  # raises if the model cannot stream
    cuts = _checked_cuts(cuts, seq)
    _check_resets(resets, batch, seq)
    x = random_input(model, batch, seq * model.frame_size, seed)
    _check_not_random(model, x, context)
    check_shapes(model, seq=seq, batch=batch, seed=seed)
    check_lookahead(model, seq=seq, batch=batch, seed=seed, tolerance=tolerance)
    tolerance = _tolerance(model) if tolerance is None else tolerance
    marks = _marks(x, resets, model.frame_size) if resets else None
    whole, last = model(x, return_state=True, resets=marks, **context)
    if all(map(has_tokens, _output_types(model).values())):  # a vector needs a token
        _check_no_tokens(model, x, context, marks, whole, last, tolerance)
    leaves = [t for t in (x, *context.values(), *model.parameters()) if t.requires_grad]
    gradients = _gradients(whole, leaves)
    _assert_tree_close("without a state: output", model(x, resets=marks, **context), whole, tolerance)
    for name, found, state in _splits(model, x, context, cuts, marks):
        _assert_tree_close(f"{name}: output", found, whole, tolerance)
        _assert_tree_close(f"{name}: state", state, last, tolerance, model.declared_state)
        _assert_gradients_close(name, _gradients(found, leaves), gradients, tolerance)
    if marks is None or not model.takes_frames:
        with torch.no_grad(), _evaluating(model):  # steps run different, planned code then
            expected = model(x, return_state=True, resets=marks, **context)
            found = _steps(model, x, context, marks)
        _assert_tree_close("steps without gradients: output", found[0], expected[0], tolerance)
        _assert_tree_close("steps without gradients: state", found[1], expected[1], tolerance, model.declared_state)
    if marks is not None and model.spec.output and all(map(has_tokens, _output_types(model).values())):
        _assert_tree_close("resets: each sequence by itself", _pieces(model, x, context, marks), whole, tolerance)


@contextlib.contextmanager
def _evaluating(model: SequenceModel) -> Iterator[None]:
    """Put all modules into evaluation mode, and back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_model(check: Callable[..., None], model: object) -> None:
    if not isinstance(model, SequenceModel):
        raise UsageError(f"{check.__name__} needs a model from seqblocks.build, not {type(model).__name__}")


def _check_no_tokens(
    model: SequenceModel, x: Tensor, context: Context, marks: Tensor | None, whole: Output, last: States,
    tolerance: float,
) -> None:  # fmt: skip
    """Assert that a call without tokens changes nothing, before the first token and after the last one."""
    with torch.no_grad():
        _, first = model(x[:, :0], return_state=True, **context)
        _, same = model(x[:, :0], state=last, return_state=True)
        y = model(x, state=first, resets=marks)
    _assert_tree_close("after a call without tokens: output", y, whole, tolerance)
    _assert_tree_close("a call without tokens: state", same, last, 0.0)


def _checked_cuts(cuts: Sequence[int] | None, seq: int) -> Sequence[int]:
    if seq < 1:
        raise UsageError(f"a sequence needs at least one token, not {seq}")
    cuts = [cut for cut in (1, 2, 11) if cut < seq] if cuts is None else cuts
    outside = [cut for cut in cuts if not 0 < cut < seq]
    if outside:
        raise UsageError(f"a sequence of {seq} can be split at 1 to {seq - 1}, not at {outside[0]}")
    return cuts


def _check_resets(resets: Sequence[tuple[int, int]], batch: int, seq: int) -> None:
    stray = [(row, at) for row, at in resets if not (0 <= row < batch and 0 <= at < seq)]
    if stray:
        raise UsageError(f"resets must be (row, position) in {batch} rows of {seq}, not {stray[0]}")


def _marks(x: Tensor, resets: Sequence[tuple[int, int]], frame: int) -> Tensor:
    marks = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    for row, at in resets:
        marks[row, at * frame] = True
    return marks


def _splits(
    model: SequenceModel, x: Tensor, context: Context, cuts: Sequence[int], marks: Tensor | None
) -> Iterator[tuple[str, Output, States]]:
    """Yield output and final state computed by chunks, then by steps; with resets, steps are chunks of one frame."""
    frame = model.frame_size
    frames = list(range(0, x.shape[1] + 1, frame))
    edges = [cut * frame for cut in sorted({0, len(frames) - 1, *cuts})]
    yield "chunks", *_chunks(model, x, context, edges, marks)
    yield "steps", *(_steps(model, x, context) if marks is None else _chunks(model, x, context, frames, marks))


def check_lookahead(
    model: SequenceModel, *, seq: int = 23, batch: int = 2, seed: int = 0, tolerance: float | None = None
) -> None:
    """Assert that no output depends on tokens after its own declared lookahead (`lookahead.of_outputs`).

    seq: number of frames, as in `check_law`, if the spec does not fix the length. There is nothing to check for a model
    that reads images, returns a vector, or has unlimited lookahead. Tokens after several positions are replaced by new
    random ones; outputs that may not depend on them must stay equal, up to `tolerance` of the largest value.
    """
    _check_model(check_lookahead, model)
    found = {name: ahead.tokens for name, ahead in lookahead.of_outputs(model.spec).items()}
    ahead = {name: ceil(tokens) for name, tokens in found.items() if tokens < lookahead.WHOLE}
    if not ahead:
        return
    tolerance = _tolerance(model) if tolerance is None else tolerance
    seq = _length(model, seq)
    rates = {name: wire.rate for name, wire in _output_types(model).items() if name in ahead}
    context = random_context(model, batch, seed, seq)
    with torch.no_grad():
        x, other = (random_input(model, batch, seq, seed + at).detach() for at in (0, 1))
        before = _by_name(model(x, **context))
        for start in sorted({start for tokens in ahead.values() for start in _starts(tokens + 1, seq)}):
            after = _by_name(model(torch.cat([x[:, :start], other[:, start:]], 1), **context))
            for name, rate in rates.items():
                count = max(-(-(start - ahead[name]) // rate), 0)  # the number of outputs that must not change
                of = f" of {name}" if name else ""
                what = f"lookahead {ahead[name]}{of}: outputs before token {start} of the input"
                _assert_close(what, after[name][:, :count], before[name][:, :count], tolerance)


def _starts(first: int, seq: int) -> list[int]:
    """Return seven positions from `first` to the last. All outputs may depend on the tokens before `first`."""
    return sorted({first + (seq - 1 - first) * part // 6 for part in range(7)}) if first < seq else []


def _length(model: SequenceModel, frames: int) -> int:
    length = model.spec.input.length
    return length if isinstance(length, int) else frames * model.frame_size


def _tolerance(model: SequenceModel) -> float:
    dtype = dtype_of(model)
    return 1e-9 if dtype == torch.float64 else torch.finfo(dtype).eps ** 0.5


def _output_types(model: SequenceModel) -> dict[str, Wire]:
    """Return the types of the outputs by name; a single unnamed output has the name ""."""
    types = model.spec.outputs or {"": model.spec.output}
    return {name: wire for name, wire in types.items() if wire}


def _check_not_random(model: SequenceModel, x: Tensor, context: Context) -> None:
    """Raise UsageError if two calls of a model differ, since its dropout would fail every check."""
    if not model.training:
        return
    with torch.no_grad():
        first, second = (_by_name(model(x, **context)) for _ in range(2))
    if not all(torch.allclose(y, second[name], rtol=1e-2, atol=1e-2, equal_nan=True) for name, y in first.items()):
        raise UsageError("two calls of this model differ, as with dropout in training mode: call model.eval() first")


def _by_name(y: Output) -> dict[str, Tensor]:
    return y if isinstance(y, dict) else {"": y}


def check_shapes(model: SequenceModel, *, seq: int = 23, batch: int = 2, seed: int = 0) -> None:
    """Assert that each step of a model matches its declarations: shape and bounds of its output, and its state.

    seq: number of frames, as in `check_law`, if the spec does not fix the length.
    """
    _check_model(check_shapes, model)
    seq = _length(model, seq)
    streams = model.streaming_obstacle is None
    states = declared(model.graph)
    context = random_context(model, batch, seed, seq)
    wires = [*model.spec.inputs.values()] or [model.spec.input]
    lengths = {name: open_context_length(model) for wire in wires for name in names_of(wire.length or 0)}
    lengths |= dict.fromkeys(names_of(wires[0].length or 0), seq)

    def watch(name: str, step: StepModule, wire: Wire) -> Any:
        def check(_module: Any, _inputs: Any, given: dict[str, Any], y: Any) -> None:
            if y is None and given["call"].phase == "context":  # this call only computed the stream's initial state
                return
            is_inside = name.startswith(inside)
            axes = [*y.shape[1:]] if is_inside else [size_of(axis, lengths.__getitem__) for axis in wire.axes[1:]]
            if wire.prefix and given["call"].phase:  # a stream runs a step on the prefix, and then on its own tokens
                axes[0] = wire.prefix if given["call"].phase == "context" else axes[0] - wire.prefix
            counts = [lane for lane in wire.lanes if isinstance(lane, int)]
            count = batch * prod(counts) if len(counts) == len(wire.lanes) else y.shape[0]  # of sequences inside `each`
            expected = [count, *axes]
            if is_inside:  # experts and `choose` have varying numbers of tokens, a cell one or several
                count = y.shape[0]
                expected = [*y.shape[:-1], wire.features]
            _assert_shape(f"{name}: output", y, expected)
            _assert_facts(f"{name}: output", y, wire.facts)
            if given["call"].return_state and isinstance(step, Primitive | Cell) and not wire.context:
                carried = reduce(lambda tree, part: tree.get(part, {}), name.split("."), states)
                own = {key: item._replace(shape=item.shape[len(counts) :]) for key, item in carried.items()}
                _assert_state(name, given["call"].made, own, count)

        return step.register_forward_hook(check, with_kwargs=True)

    with all_primitives(model):
        steps = [(name, step) for name, step in model.named_modules() if isinstance(step, StepModule)]
        routers = [(name, step) for name, step in steps if isinstance(step, Experts)]
        inside = tuple(f"{name}.{label}." for name, step in routers for label in step.labels)
        inside += tuple(f"{name}." for name, step in steps if isinstance(step, Cell | Choose))
        hooks = [watch(name, step, wire) for name, step in steps if (wire := type_of(step))]
        try:
            with torch.no_grad():
                model(random_input(model, batch, seq, seed), return_state=streams, **context)
                if graph.has_prefix(model.graph):
                    model(random_input(model, batch, seq, seed), **context)
        finally:
            for hook in hooks:
                hook.remove()


def _assert_state(name: str, state: Any, expected: States, batch: int) -> None:
    assert isinstance(state, dict), f"{name}: state: {type(state).__name__} is not a dict"
    assert set(state) == set(expected), f"{name}: state: {sorted(state)} is not {sorted(expected)}, as declared"
    for key, item in expected.items():
        _assert_shape(f"{name}: state {key}", state[key], [batch, *item.shape])


def _assert_shape(what: str, found: Any, expected: list[int]) -> None:
    assert isinstance(found, Tensor), f"{what}: {type(found).__name__} is not a tensor"
    assert list(found.shape) == expected, f"{what}: {list(found.shape)} is not {expected}, as declared"


def _assert_facts(what: str, y: Tensor, facts: Facts) -> None:
    if facts == UNBOUNDED or not y.numel():
        return
    exact = y.detach().double()
    room = torch.finfo(y.dtype).eps ** 0.5 * max(1.0, exact.abs().max().item())
    low, high = exact.min().item(), exact.max().item()
    assert facts.low - room <= low <= high <= facts.high + room, f"{what}: {low:g} to {high:g} is not {facts}"
    if facts.unit:
        longest = exact.reshape(*exact.shape[:-1], facts.unit, -1).norm(dim=-1).max().item()
        assert longest <= 1 + room, f"{what}: heads of length {longest:g} are longer than 1, as declared"


def _chunks(
    model: SequenceModel, x: Tensor, context: Context, edges: Sequence[int], marks: Tensor | None
) -> tuple[Output, Any]:
    parts, state = [], None
    for a, b in pairwise(edges):
        resets = None if marks is None else marks[:, a:b]
        y, state = model(x[:, a:b], state=state, return_state=True, resets=resets, **(context if state is None else {}))
        parts.append(_by_name(y))
    return _joined(model, parts), state


def _steps(
    model: SequenceModel, x: Tensor, context: Context, marks: Tensor | None = None
) -> tuple[Output, Any]:
    parts, state = [], model.init_state(x.shape[0], **context)
    one = not model.takes_frames
    types = _output_types(model)
    for t in range(0, x.shape[1], model.frame_size):
        resets = None if marks is None else marks[:, t]
        y, state = model.step(x[:, t] if one else x[:, t : t + model.frame_size], state, resets=resets)
        named = _by_name(y).items()
        parts.append({name: y.unsqueeze(1) if one and has_tokens(types[name]) else y for name, y in named})
    return _joined(model, parts), state


def _joined(model: SequenceModel, parts: list[dict[str, Tensor]]) -> Output:
    """Join the outputs of chunks along the sequence; for a single vector per sequence, return the last one."""
    found = {
        name: torch.cat([part[name] for part in parts], 1) if has_tokens(wire) else parts[-1][name]
        for name, wire in _output_types(model).items()
    }
    return found if model.spec.outputs else found[""]


def _pieces(model: SequenceModel, x: Tensor, context: Context, marks: Tensor) -> Output:
    rows = []
    for row in range(x.shape[0]):
        edges = sorted({0, x.shape[1], *torch.nonzero(marks[row]).flatten().tolist()})
        own = {name: each[row : row + 1] for name, each in context.items()}
        parts = [_by_name(model(x[row : row + 1, a:b], **own)) for a, b in pairwise(edges)]
        rows.append(_by_name(_joined(model, parts)))
    found = {name: torch.cat([each[name] for each in rows]) for name in rows[0]}
    return found if model.spec.outputs else found[""]


def _gradients(y: Output, leaves: list[Tensor]) -> list[Tensor]:
    outputs = [each for each in _by_name(y).values() if each.requires_grad]  # integer outputs do not
    if not outputs:
        return []
    total = sum((each * _weights(each)).sum() for each in outputs)
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)


def _assert_gradients_close(name: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    largest = max((g.double().abs().max().item() for g in expected if g.numel()), default=0.0)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        _assert_close(f"{name}: gradient {index}", a, b, tolerance, 1e-4 * largest)


def _assert_tree_close(what: str, found: Any, expected: Any, tolerance: float, declared: Any = None) -> None:
    """Assert that two trees of tensors are close. declared: the layout of these states."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), f"{what}: {sorted(found)} is not {sorted(expected)}"
        for key, value in expected.items():
            layout = declared.get(key) if isinstance(declared, dict) else None
            _assert_tree_close(f"{what}.{key}", found[key], value, tolerance, layout)
        return
    if isinstance(declared, State) and declared.period and found.shape == expected.shape:
        found = found - declared.period * ((found - expected) / declared.period).round()
    _assert_close(what, found, expected, tolerance)


def _assert_close(what: str, found: Tensor, expected: Tensor, tolerance: float, least: float = 1.0) -> None:
    """Assert that two tensors differ by at most `tolerance` times max(1, `least`, the largest expected value)."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)} is not {list(expected.shape)}"
    if not expected.numel():
        return
    error = (found.double() - expected.double()).abs().max().item()
    scale = max(1.0, least, expected.double().abs().max().item())
    assert error <= tolerance * scale, f"{what}: differs by {error:.3g}, more than {tolerance:g} of {scale:.3g}"
