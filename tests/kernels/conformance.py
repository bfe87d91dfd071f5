"""Descriptions of kernels, from which test_conformance.py generates all its cases.

A `Kernel` describes how to make its inputs, which of them are sequences and which a state, how to call it (`variants`),
the sizes to compare at, and its accuracy. A `Subject` is one variant on one implementation. Results are compared with
the reference implementation in float64 on the same rounded numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.differences import differences
from benchmarks.launches import chunks, launches
from seqblocks.kernels import triton_common
from tests.kernels import interpreter  # noqa: F401  # installs an emulation of bfloat16

Tensors = dict[str, Tensor]

UNDERFLOW = 2**-126  # smaller numbers may be zero in float32

# One rounding to nearest, relative to the largest value: half the distance between neighbours. All earlier operations
# are in float32 and add at most 2 %.
ROUNDING = {torch.float16: 0.51 * 2**-10, torch.bfloat16: 0.51 * 2**-7}

INTERPRETED = pytest.mark.skipif(
    not triton_common.INTERPRETED,
    reason=triton_common.MISSING or "triton's interpreter is off: TRITON_INTERPRET=1, or no GPU, turns it on",
)
COMPILED = pytest.mark.skipif(
    bool(triton_common.MISSING) or triton_common.INTERPRETED,
    reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
)


def on_device(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(COMPILED(test))


def of_models(name: str) -> Any:
    """Return a module of seqblocks that needs pydantic, or skip the test: machines with a GPU may lack it."""
    pytest.importorskip("pydantic", reason="uses a part of models, which need pydantic")
    return importlib.import_module(f"seqblocks.{name}")


def float32_bar(length: int) -> float:
    """Return the tolerance of recurrences and sums over `length` tokens: each token adds a few roundings of 2^-24 that
    do not grow."""
    return (16 + length) * 2**-23


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers in float64, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reset_marks(batch: int, length: int, stride: int = 5) -> Tensor:
    """Return resets at both ends, adjacent to each other, and at random places."""
    found = draw(batch, length, seed=length).abs() > 1.6
    found[:, ::stride] |= draw(batch, -(-length // stride), seed=1) > 0.5
    if batch and length > 3:
        found[0, [0, 2, 3, -1]] = True
    return found


def marked(seq: int, marks: list[tuple[int, int]]) -> Tensor:
    """Return resets of two sequences at the given places (row, token)."""
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    return resets


# ------------------------------------------------------------------------------------------------ layouts


def sliced(x: Tensor) -> Tensor:
    """Return the same numbers as one half of rows twice as long, like the output of a split projection."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with no axis contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    """Return the same numbers with batch and tokens swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x


def expanded(x: Tensor) -> Tensor:
    """Return the first row for the whole batch, with a stride of 0."""
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x, "sliced": sliced, "strided": strided, "transposed": transposed, "expanded": expanded,
}


# ------------------------------------------------------------------------------------------------ descriptions


class Precision(NamedTuple):
    """The dtype of the 16-bit inputs, or of all inputs with `throughout`; the others are float32 otherwise."""

    dtype: torch.dtype
    throughout: bool = False

    @property
    def others(self) -> torch.dtype:
        narrow = self.dtype in ROUNDING and not self.throughout
        return torch.float32 if narrow else self.dtype

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (" throughout" if self.throughout else "")


SIXTEEN = (Precision(torch.bfloat16), Precision(torch.float16), Precision(torch.bfloat16, throughout=True))


@dataclass(frozen=True)
class Implementation:
    """`exact`: the widest dtype it computes in; `precisions`: those it is compared in."""

    name: str
    backend: str
    exact: torch.dtype
    precisions: tuple[Precision, ...]
    device: str = "cpu"
    marks: tuple[pytest.MarkDecorator, ...] = ()


SINGLE = (Precision(torch.float32), *SIXTEEN)
IMPLEMENTATIONS = {
    "reference": Implementation("reference", "reference", torch.float64, SINGLE),  # in float64 it is the reference
    "torch": Implementation("torch", "torch", torch.float64, (Precision(torch.float64), *SINGLE)),
    "triton": Implementation("triton", "triton", torch.float32, SINGLE, marks=(INTERPRETED,)),
    "gpu": Implementation("gpu", "triton", torch.float32, SINGLE, "cuda", (pytest.mark.gpu, COMPILED)),
    "device": Implementation("device", "torch", torch.float32, SINGLE, "cuda", (pytest.mark.gpu,)),
}
CPU = ("reference", "torch", "triton")


@dataclass(frozen=True)
class Variant:
    """A way to call a kernel. `sizes`: sizes that differ from the default; `without`: optional tensors to omit;
    `fixed`: sequences that are the same for all tokens; `on`: the implementations that support it, if not all."""

    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    on: tuple[str, ...] = tuple(IMPLEMENTATIONS)


def one_rounding(backend: str, dtype: torch.dtype, length: int) -> float:
    """Return the roundings of a kernel that computes in float32 and rounds its results."""
    return 1.0


def no_cancellation(x: Tensors, expected: Tensors, given: Tensors, **options: Any) -> dict[str, float]:
    """Declare that no result is a difference of larger sums."""
    return {}


@dataclass(frozen=True)
class Kernel:
    """A description of a kernel. All tensors have the names of the parameters of `function`."""

    name: str
    function: Callable[..., Any]  # (**tensors, **options, backend=) -> y, or y and the state
    make: Callable[..., Tensors]  # (batch=, S=, sizes...) -> float64, optional tensors and the state included
    sequences: tuple[str, ...]  # inputs [batch, S, ...]
    shapes: tuple[Mapping[str, int], ...]  # sizes to compare at: around the size of a chunk or a tile
    device_shapes: tuple[Mapping[str, int], ...] = ()  # more of them, for a GPU
    ranges: Mapping[str, Sequence[int]] = field(default_factory=dict)  # sizes that must not affect the result
    small: Mapping[str, int] = field(default_factory=dict)  # for numerical derivatives
    states: tuple[str, ...] = ()  # parts of the state, [batch, ...], in its order
    narrow: tuple[str, ...] = ()  # inputs that may be 16 bits wide next to float32; the sequences by default
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"": Variant()})  # the default one first
    implementations: tuple[str, ...] = ("reference", "torch", "triton", "gpu")
    resets: bool = True
    reverse: bool = True
    min_length: int = 0
    bar: Callable[[int], float] = float32_bar  # of float32, by length; float64's is as many of its own units
    roundings: Callable[[str, torch.dtype, int], float] = one_rounding  # of 16 bits, by backend, dtype and length
    double_backward: tuple[str, ...] = ("reference",)  # implementations with derivatives of every order
    reverse_mode_only: tuple[str, ...] = ("torch",)  # CPU implementations with derivatives in reverse mode only
    errors: tuple[tuple[Callable[[Tensors], dict[str, Any]], str], ...] = ()  # the change and the message
    facts: Mapping[str, Any] = field(default_factory=dict)  # a call that Triton supports, as passed to `why`
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()  # facts that differ, and the reason
    # Results that are differences of larger, rounded sums: roundings times the sizes of the sums, from the inputs, the
    # results of the reference, the cotangents of its outputs, and the options of the call.
    cancellation: Callable[..., Mapping[str, float]] = no_cancellation
    cancelling: tuple[str, ...] = ("triton",)  # the implementations that compute such differences
    first_interpreted: str | None = None  # the mark of the first cases in Triton's interpreter
    pairs_interpreted: str = "slow"  # the mark of the further cases in Triton's interpreter: `long` if there are many
    exact_zeros: bool = False  # such differences may be zero, so that only rounding is left, in wide dtypes too
    # Parts of the state with a kink where two gates are equal. With gates that depend on rounded outputs, `cancelling`
    # implementations may take the other side of it, so that these parts have no gradient in 16 bits.
    kinked: tuple[str, ...] = ()
    added: tuple[str, ...] = ()  # inputs whose dtype does not affect the choice of an implementation

    def tensors(self, variant: Variant, *, state: bool = True, **sizes: int) -> Tensors:
        made = self.make(**{**variant.sizes, **sizes})
        kept = {name: x for name, x in made.items() if name not in variant.without}
        return kept if state else {name: x for name, x in kept.items() if name not in self.states}

    def exactness(self, implementation: Implementation, dtype: torch.dtype, length: int) -> float:
        """Return the tolerance of a result, relative to its largest value."""
        if dtype == torch.float64:
            return self.bar(length) * 2**-29
        rounded = ROUNDING.get(dtype, 0.0) * self.roundings(implementation.backend, dtype, length)
        return max(self.bar(length), rounded)


class Subject(NamedTuple):
    """A variant of a kernel on an implementation."""

    kernel: Kernel
    variant: str
    on: Implementation

    def inputs(self, *, state: bool = True, **sizes: int) -> Tensors:
        """Return the inputs in float64, on the CPU."""
        return self.kernel.tensors(self.kernel.variants[self.variant], state=state, **sizes)

    def exact(self, *, state: bool = True, **sizes: int) -> Tensors:
        """Return leaves of the widest supported dtype, on the device of the implementation."""
        return self.leaves(self.inputs(state=state, **sizes), Precision(self.on.exact))

    def leaves(self, x: Tensors, precision: Precision) -> Tensors:
        return {name: t.to(self.on.device).requires_grad_(t.is_floating_point())
                for name, t in self.rounded(x, precision).items()}

    def rounded(self, x: Tensors, precision: Precision) -> Tensors:
        narrow = self.kernel.narrow or self.kernel.sequences
        return {
            name: t.to(precision.dtype if name in narrow else precision.others) if t.is_floating_point() else t
            for name, t in x.items()
        }

    def tokens(self) -> tuple[str, ...]:
        """Return the names of inputs that have a token axis."""
        variant = self.kernel.variants[self.variant]
        return tuple(name for name in self.kernel.sequences if name not in (*variant.fixed, *variant.without))

    def cut(self, x: Tensors, a: int, b: int) -> Tensors:
        return {name: t[:, a:b] if name in self.tokens() else t for name, t in x.items()}

    def __call__(
        self, x: Tensors, *, backend: str | None = None, resets: Tensor | None = None, reverse: bool = False,
        return_state: bool = True, **options: Any,
    ) -> Tensors:
        """Return the output as "out", and the parts of the last state by their names."""
        kernel = self.kernel
        given: dict[str, Any] = {name: t for name, t in x.items() if name not in kernel.states}
        given |= kernel.variants[self.variant].options
        single = len(kernel.states) == 1
        if kernel.states:
            parts = tuple(x[name] for name in kernel.states) if kernel.states[0] in x else None
            given |= {"state": parts[0] if single and parts else parts, "return_state": return_state}
        if resets is not None:
            given["resets"] = resets.to(self.on.device)
        if kernel.reverse:
            given["reverse"] = reverse
        out = kernel.function(**{**given, **options}, backend=backend or self.on.backend)
        if not kernel.states or not return_state:
            return {"out": out}
        y, last = out
        return {"out": y, **dict(zip(kernel.states, [last] if single else last, strict=True))}

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kernel.name, self.variant, self.on.name)))


# ------------------------------------------------------------------------------------------------ comparing


def floating(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if x.is_floating_point()}


def cotangents(out: Tensors) -> Tensors:
    """Return asymmetric numbers that bfloat16 represents exactly, since autograd casts them to the dtype of the output.
    """
    return {name: draw(*x.shape, seed=100 + at).bfloat16() for at, (name, x) in enumerate(floating(out).items())}


def with_gradients(out: Tensors, leaves: Tensors) -> Tensors:
    """Return outputs, and each leaf's gradient for their `cotangents`."""
    given = cotangents(out)
    parts = {name: x for name, x in floating(out).items() if x.requires_grad}
    loss: Any = sum((x.double() * given[name].to(x.device)).sum() for name, x in parts.items())
    if not isinstance(loss, Tensor):  # no output depends on a leaf
        return out
    expected = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, [*expected.values()], allow_unused=True, materialize_grads=True)
    return {**out, **{f"gradient of {name}": g for name, g in zip(expected, grads, strict=True)}}


def assert_close(
    found: Tensors, references: Tensors, bar: float, smallest: float = 0.0, least: Mapping[str, float] | None = None,
    chunks: Iterable[int] = (),
) -> None:
    """Compare each result to `bar` of its largest value, or of `smallest` if that is smaller: zeros may be rounded.

    `least`: errors that are always allowed, by the names of results. `chunks`: tokens per chunk or tile of the kernels,
    for the message, which describes the errors of all results.
    """
    assert [*found] == [*references]
    faults = []
    for name, expected in references.items():
        actual = found[name]
        assert actual.shape == expected.shape, name
        allowed = 0.0
        if expected.is_floating_point() and expected.numel():
            relative = bar * max(expected.detach().abs().max().item(), smallest)
            allowed = max(relative, (least or {}).get(name, 0.0)) + UNDERFLOW
        if where := differences(actual, expected, allowed, chunks):
            faults.append(f"{name}: {where}")
    assert not faults, "\n".join(faults)


def check(
    subject: Subject, inputs: Tensors, *, precision: Precision = SINGLE[0], layout: str = "contiguous",
    laid_out: Iterable[str] | None = None, bar: float | None = None, **options: Any,
) -> None:
    """Assert that the outputs, states and gradients of `inputs` (float64) equal those of the reference in float64 on
    the same rounded numbers. `laid_out`: names of the inputs that have the layout, if not all."""
    x = subject.rounded(inputs, precision)
    kernel, view = subject.kernel, LAYOUTS[layout]
    if layout == "expanded":
        laid_out = (*subject.tokens(), *kernel.states)
    chosen = x.keys() if laid_out is None else laid_out
    is_cancelling = subject.on.backend in kernel.cancelling
    smooth_only = is_cancelling and precision.dtype in ROUNDING

    def results(backend: str, dtype: torch.dtype | None, device: str) -> tuple[Tensors, dict[str, Tensors]]:
        leaves = {
            name: t.to(device, dtype if t.is_floating_point() else None).requires_grad_(t.is_floating_point())
            for name, t in x.items()
        }
        viewed = {name: view(t) if name in chosen else t for name, t in leaves.items()}
        out = subject._replace(on=replace(subject.on, backend=backend, device=device))(viewed, **options)
        given = cotangents(out)
        if smooth_only:
            out = {name: t.detach() if name in kernel.kinked else t for name, t in out.items()}
        return with_gradients(out, viewed), {"viewed": viewed, "given": given}

    expected, exact = results("reference", torch.float64, "cpu")
    with launches() if subject.on.backend == "triton" else contextlib.nullcontext([]) as launched:
        found, _ = results(subject.on.backend, None, subject.on.device)
    for name, t in found.items():
        if name.startswith("gradient"):
            assert t.dtype == x[name.removeprefix("gradient of ")].dtype, name
    if bar is None:
        bar = kernel.exactness(subject.on, precision.dtype, x[kernel.sequences[0]].shape[1])
    largest = max((t.abs().max().item() for t in floating(expected).values() if t.numel()), default=0.0)
    least: Mapping[str, float] = {}
    unit = ROUNDING.get(precision.dtype, torch.finfo(precision.dtype).eps if kernel.exact_zeros else 0.0)
    if unit and is_cancelling:
        call = {**kernel.variants[subject.variant].options, **options}
        sizes = kernel.cancellation(exact["viewed"], expected, exact["given"], **call)
        least = {name: unit * size for name, size in sizes.items()}
    smallest = largest / (500 if layout == "expanded" else 1000)  # the sums of equal rows are twice as large
    assert_close(found, expected, bar, smallest, least, chunks(launched))


def assert_equal(found: Tensors, references: Tensors) -> None:
    """Assert that all bits are equal."""
    assert [*found] == [*references]
    faults = [
        f"{name}: {differences(found[name], expected, 0.0) or 'other dtype or NaN'}"
        for name, expected in references.items() if not torch.equal(found[name], expected)
    ]
    assert not faults, "\n".join(faults)


def in_pieces(
    subject: Subject, x: Tensors, cuts: Iterable[int], *, resets: Tensor | None = None, reverse: bool = False
) -> Tensors:
    """Return the result of a call, computed by calls on the pieces between the cuts that pass the state on."""
    length = x[subject.kernel.sequences[0]].shape[1]
    state = {name: x[name] for name in subject.kernel.states}
    outputs: list[Tensor] = []
    spans = [*itertools.pairwise((0, *cuts, length))]
    for a, b in reversed(spans) if reverse else spans:
        piece = subject.cut(x, a, b) | state
        state = subject(piece, resets=None if resets is None else resets[:, a:b], reverse=reverse)
        outputs.append(state.pop("out"))
    return {"out": torch.cat(outputs[::-1] if reverse else outputs, 1), **state}


def check_poison(
    subject: Subject, poison: float, *, reverse: bool = False, cuts: Iterable[int] = (), **sizes: int
) -> None:
    """Assert that a reset stops values that are not finite, forward and backward.

    In the first row a reset follows tokens that are not finite. The second begins with a reset on a state that is not
    finite. The third has neither. The loss reads the tokens after the resets.
    """
    S, tokens, states = 8, subject.tokens(), subject.kernel.states
    before, after = (slice(5, S), slice(0, 5)) if reverse else (slice(0, 3), slice(3, S))
    marks = torch.zeros(3, S, dtype=torch.bool)
    marks[0, 4 if reverse else 3] = marks[1, -1 if reverse else 0] = True

    def results(bad: float | None) -> Tensors:
        x = {name: t.detach().clone() for name, t in subject.exact(batch=3, S=S, **sizes).items()}
        for name, t in x.items():
            if bad is not None and name in tokens:
                t[0, before][0] = bad
                t[0, before][2].view(-1)[0] = -bad
            elif bad is not None and name in states and t.is_floating_point():
                t[:2] = bad
        leaves = {name: t.requires_grad_(t.is_floating_point()) for name, t in x.items()}
        last = in_pieces(subject, leaves, cuts, resets=marks, reverse=reverse)
        out = last.pop("out")
        if subject.kernel.name in ("attention", "attention_with_first"):
            last = {}  # a cache contains tokens that are no longer read
        return with_gradients({"after": out[0, after], "others": out[1:], **last}, leaves)

    found = results(poison)
    for name in (*tokens, *states):
        gradient = found.get(f"gradient of {name}")
        if gradient is not None:
            reached = gradient[0, before] if name in tokens else gradient[:2]
            assert not reached.any(), f"a gradient of {name} depends on tokens after the reset"
    assert_close(found, results(None), subject.kernel.exactness(subject.on, subject.on.exact, S))


# ------------------------------------------------------------------------------------------------ cases


def cover(axes: Sequence[Sequence[Any]], name: str) -> list[tuple[tuple[Any, ...], bool]]:
    """Return cases in which all pairs of values of different axes occur, with a mark for the first few cases, in which
    each value occurs at least once."""
    rng = random.Random(name)
    sizes = [len(values) for values in axes]

    def pairs(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}

    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(axes)), 2)
        for i in range(sizes[a]) for j in range(sizes[b])
    }
    unseen = {(a, i) for a, n in enumerate(sizes) for i in range(n)}
    cases: list[tuple[tuple[Any, ...], bool]] = []
    while open_pairs or unseen:
        quick = bool(unseen)
        fixed = dict(sorted(unseen, reverse=True))
        if not fixed:
            a, i, b, j = min(open_pairs)
            fixed = {a: i, b: j}
        drawn = [tuple(fixed.get(a, rng.randrange(n)) for a, n in enumerate(sizes)) for _ in range(24)]
        best = max(drawn, key=lambda case: len(pairs(case) & open_pairs))
        open_pairs -= pairs(best)
        unseen -= {*enumerate(best)}
        cases.append((tuple(axis[i] for axis, i in zip(axes, best, strict=True)), quick))
    return cases


def crossed(
    *axes: tuple[str, Iterable[Any]], rest: str = "slow", later: Sequence[Any] = ()
) -> pytest.MarkDecorator:
    """Return one `parametrize` for each axis, in which every value occurs. The cases that cover all pairs of values are
    marked `rest`. An axis may have several names, separated by commas. `later`: values that take the way of others in
    the kernels, so that their first cases are slow."""
    names = [name.strip() for text, _ in axes for name in text.split(",")]
    found = []
    for case, quick in cover([[*values] for _, values in axes], "".join(names)):
        values = [v for (text, _), x in zip(axes, case, strict=True) for v in (x if "," in text else (x,))]
        label = "-".join(label_of(name, value) for name, value in zip(names, values, strict=True))
        mark = rest if not quick else "slow" if any(value in later for value in case) else ""
        found.append(pytest.param(*values, id=label, marks=[getattr(pytest.mark, mark)] if mark else []))
    return pytest.mark.parametrize(names, found)


Axis = Sequence[Any] | Callable[[Kernel, Implementation], Iterable[Any]]


def cases(
    kernels: Iterable[Kernel], on: Sequence[str] = CPU, *, variants: Sequence[str] = tuple(IMPLEMENTATIONS),
    rest: str = "slow", interpreted: str | None = "slow", quick_for: Sequence[str] = (), **axes: Axis,
) -> pytest.MarkDecorator:
    """Parametrise over `subject` and the axes: for each kernel and implementation there are cases with every value,
    and, marked `rest`, cases that cover all pairs of values, long for the reference. On a GPU all of them run.
    `variants`: the implementations for which the variant is also an axis; the others use the default one.
    `interpreted`: the mark of the first cases in Triton's interpreter, which is slow; None for the property that
    implies most others. `quick_for`: the kernels whose first cases are not marked slow, where others take the same way;
    by default all."""
    out = []
    for kernel in kernels:
        for name in on:
            if name not in kernel.implementations:
                continue
            found = IMPLEMENTATIONS[name]
            of_kernel = [label for label, variant in kernel.variants.items() if name in variant.on]
            values: list[list[Any]] = [of_kernel if name in variants else of_kernel[:1]]
            values += [[*(axis(kernel, found) if callable(axis) else axis)] for axis in axes.values()]
            for (variant, *others), quick in cover(values, kernel.name + name):
                first = {"triton": interpreted or kernel.first_interpreted}.get(name)
                if quick_for and kernel.name not in quick_for:
                    first = "slow"
                mark = first if quick or name in ("gpu", "device") else rest
                if mark == rest == "slow" and not quick:
                    mark = {"triton": kernel.pairs_interpreted, "reference": "long"}.get(name, mark)
                marks = [*found.marks, *([getattr(pytest.mark, mark)] if mark else [])]
                subject = Subject(kernel, variant, found)
                label = "-".join([str(subject), *(label_of(*x) for x in zip(axes, others, strict=True))])
                out.append(pytest.param(subject, *others, marks=marks, id=label))
    return pytest.mark.parametrize(("subject", *axes), out)


def in_the_interpreter(cases: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return the same cases, of Triton's interpreter on the CPU."""
    names, params = cases.args
    on = IMPLEMENTATIONS["triton"]
    return pytest.mark.parametrize(
        names, [pytest.param(p.values[0]._replace(on=on), *p.values[1:], marks=on.marks, id=p.id) for p in params]
    )


def label_of(axis: str, value: Any) -> str:
    """Return a value as part of a test name."""
    if isinstance(value, bool):
        return axis if value else f"no {axis}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}{size}" for name, size in value.items())
    return str(value)
