"""Properties that every implementation of every kernel must have. Properties of a single kernel are in its own file.

Each test runs a few cases per kernel and implementation, in which every value of every axis occurs. Further cases,
which cover all pairs of values, are marked slow. On a GPU all of them run: `pytest tests/kernels -m gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.debugging import eager
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from seqblocks import kernels
from seqblocks.errors import BackendError, RunError
from seqblocks.kernels import dispatch
from tests.kernels.conformance import (
    CPU,
    IMPLEMENTATIONS,
    INTERPRETED,
    LAYOUTS,
    Implementation,
    Kernel,
    Precision,
    Subject,
    Tensors,
    assert_close,
    assert_equal,
    cases,
    check,
    check_poison,
    draw,
    floating,
    in_pieces,
    in_the_interpreter,
    on_device,
    reset_marks,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import KERNELS

EVERYWHERE = (*CPU, "gpu")
COMPILED = ("mlstm", "slstm", "causal_conv", "attention")  # whose compiled code the README's run tests; CI tests all
VARYING = ("associative_scan", "attention", "attention_with_first")  # the graph differs between lengths
SEQUENTIAL = [kernel for kernel in KERNELS if kernel.states]
DOUBLE = Precision(torch.float64)


def yes_if(trait: str) -> Callable[[Kernel, Implementation], list[bool]]:
    return lambda kernel, on: [False, True] if getattr(kernel, trait) else [False]


def both_in_torch(kernel: Kernel, on: Implementation) -> list[bool]:
    """Use resets or not in torch; elsewhere, where it takes long, always use them."""
    return yes_if("resets")(kernel, on) if on.name == "torch" else [kernel.resets]


def shapes(kernel: Kernel, on: Implementation) -> list[Any]:
    return [*kernel.shapes, *(kernel.device_shapes if on.name == "gpu" else ())]


# ------------------------------------------------------------------------------------------------ the definition


AXES: dict[str, Any] = {
    "shape": shapes, "precision": lambda kernel, on: on.precisions, "layout": lambda kernel, on: LAYOUTS,
    "resets": yes_if("resets"), "reverse": yes_if("reverse"), "state": yes_if("states"),
}


@cases(KERNELS, EVERYWHERE, interpreted=None, **AXES)
def test_agrees_with_the_definition(
    subject: Subject, shape: dict[str, int], precision: Precision, layout: str, resets: bool, reverse: bool, state: bool
) -> None:
    """Outputs, last states and every gradient are compared, in any dtype and layout, of any length."""
    inputs = subject.inputs(state=state, **shape)
    batch, length = inputs[subject.kernel.sequences[0]].shape[:2]
    marks = reset_marks(batch, length, max(5, length // 3)) if resets else None
    check(subject, inputs, precision=precision, layout=layout, resets=marks, reverse=reverse)


@pytest.mark.long
@in_the_interpreter(cases(KERNELS, ["gpu"], **AXES))
def test_device_cases_in_the_interpreter(
    subject: Subject, shape: dict[str, int], precision: Precision, layout: str, resets: bool, reverse: bool, state: bool
) -> None:
    """The cases of the GPU run in the interpreter, so that a tolerance that is too small fails without a GPU."""
    test_agrees_with_the_definition(subject, shape, precision, layout, resets, reverse, state)


@cases(KERNELS, EVERYWHERE, variants=(), layout=lambda kernel, on: [*LAYOUTS][1:])
def test_any_layout(subject: Subject, layout: str) -> None:
    """Use the widest dtype, where no copy that changes the dtype can hide a wrong stride."""
    check(subject, subject.inputs(S=5), precision=Precision(subject.on.exact), layout=layout)


@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_any_shape(kernel: Kernel, data: st.DataObject) -> None:
    """Empty batches, sequences or heads are included: the result equals the reference in float64."""
    subject = Subject(kernel, data.draw(st.sampled_from(sorted(kernel.variants))), IMPLEMENTATIONS["torch"])
    sizes = {name: data.draw(st.sampled_from(values), name) for name, values in kernel.ranges.items()}
    options: dict[str, Any] = {"reverse": kernel.reverse and data.draw(st.booleans(), "reverse")}
    if kernel.resets and data.draw(st.booleans(), "resets"):
        options["resets"] = reset_marks(sizes["batch"], sizes["S"])
    x = subject.leaves(subject.inputs(state=data.draw(st.booleans(), "state"), **sizes), DOUBLE)
    found, expected = (
        with_gradients(subject(x, backend=backend, **options), x) for backend in ("torch", "reference")
    )
    # A draw may come close to |q.n| = exp(-m) + eps, where the condition number is up to 1e6.
    assert_close(found, expected, 1e-9, smallest=1.0)


@cases(KERNELS, CPU[:1], resets=yes_if("resets"))
def test_derivatives(subject: Subject, resets: bool) -> None:
    """Compared with finite differences, including second derivatives where an implementation has them."""
    check_derivatives(subject, resets)


@pytest.mark.slow
@cases(KERNELS, CPU[1:2], resets=yes_if("resets"))
def test_derivatives_of_torch(subject: Subject, resets: bool) -> None:
    """The first ones also follow from test_agrees_with_the_definition."""
    check_derivatives(subject, resets)


def check_derivatives(subject: Subject, resets: bool) -> None:
    x = subject.exact(**subject.kernel.small)
    leaves = floating(x)
    marks = torch.zeros(1, subject.kernel.small["S"], dtype=torch.bool)
    marks[:, subject.kernel.small["S"] // 2] = True

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = {**x, **dict(zip(leaves, tensors, strict=True))}
        return tuple(floating(subject(given, resets=marks if resets else None)).values())

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)
    if subject.on.name in subject.kernel.double_backward:
        assert torch.autograd.gradgradcheck(run, tuple(leaves.values()), fast_mode=True)


@cases(KERNELS, CPU, variants=())
def test_a_second_derivative_is_refused_with_a_hint(subject: Subject) -> None:
    """Applies to implementations without second derivatives."""
    if subject.on.name in subject.kernel.double_backward or subject.kernel.name == "causal_conv":
        return
    x = subject.exact(**subject.kernel.small)
    first = x[subject.kernel.sequences[0]]
    (g,) = torch.autograd.grad(subject(x)["out"].square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match=r'no second derivative.*use_backend\("reference"\)'):
        g.sum().backward()


@cases(KERNELS, EVERYWHERE, variants=())
def test_upstream_gradients_of_any_layout(subject: Subject) -> None:
    """Slices, transposes and sums pass gradients with their own strides."""

    def results(on: Implementation) -> Tensors:
        subject_there = subject._replace(on=on)
        leaves = subject_there.exact()
        out = subject_there(leaves)
        y = out.pop("out")
        parts = {"slice": y[..., ::2], "transpose": y.transpose(0, 1), "sum": y.sum(tuple(range(y.dim())))}
        return with_gradients({**parts, **{name: x[..., :2] for name, x in out.items()}}, leaves)

    bar = subject.kernel.exactness(subject.on, subject.on.exact, 9)
    assert_close(results(subject.on), results(IMPLEMENTATIONS["reference"]), bar)


@cases(
    SEQUENTIAL, EVERYWHERE, variants=(), state=lambda kernel, on: [True] if on.backend == "triton" else [False, True]
)
def test_an_unrequested_state(subject: Subject, state: bool) -> None:
    """It changes neither the output nor a gradient."""
    x = subject.exact(state=state)
    alone, both = subject(x, return_state=False), subject(x)
    assert_close(
        with_gradients(alone, x), with_gradients({"out": both["out"]}, x),
        subject.kernel.exactness(subject.on, subject.on.exact, 9),
    )


@cases(SEQUENTIAL, EVERYWHERE, reverse=yes_if("reverse"), gradients=lambda kernel, on: [False, True])
def test_results_have_memory_of_their_own(subject: Subject, reverse: bool, gradients: bool) -> None:
    """Changing an output in place changes no state and no input, and a state does not keep a whole sequence alive."""
    x = subject.exact(state=False, **subject.kernel.small)
    with torch.set_grad_enabled(gradients):
        out, *state = subject(x, reverse=reverse).values()
    assert all(last.untyped_storage().nbytes() == last.numel() * last.element_size() for last in state)
    places = [t.untyped_storage().data_ptr() for t in (*x.values(), out, *state) if t.numel()]
    assert len(set(places)) == len(places)


@cases(SEQUENTIAL, EVERYWHERE, variants=(), output=lambda kernel, on: ("out", *kernel.states))
def test_a_loss_of_one_output(subject: Subject, output: str) -> None:
    """The other outputs add nothing to any gradient."""

    def results(on: Implementation) -> Tensors:
        subject_there = subject._replace(on=on)
        leaves = subject_there.exact()
        return with_gradients({output: subject_there(leaves)[output]}, leaves)

    bar = subject.kernel.exactness(subject.on, subject.on.exact, 9)
    assert_close(results(subject.on), results(IMPLEMENTATIONS["reference"]), bar)


# ------------------------------------------------------------------------------------------------ the law of states


CUTS = ((1, 2, 6), range(1, 8))


@cases(
    SEQUENTIAL, EVERYWHERE, variants=CPU[:2], cuts=CUTS, resets=yes_if("resets"), reverse=yes_if("reverse"),
)
def test_whole_is_chunks_is_steps(subject: Subject, cuts: Any, resets: bool, reverse: bool) -> None:
    """With the state passed on, outputs, last state and gradients are equal, including those of the first state."""
    S = 8
    x = subject.exact(S=S)
    marks = reset_marks(2, S) if resets else None
    whole = with_gradients(subject(x, resets=marks, reverse=reverse), x)
    pieces = in_pieces(subject, x, cuts, resets=marks, reverse=reverse)
    bar = subject.kernel.exactness(subject.on, subject.on.exact, S)
    assert_close(with_gradients(pieces, x), whole, bar, smallest=1.0)  # one key in a window: no gradient of q


@cases([k for k in KERNELS if k.resets], EVERYWHERE, variants=CPU[:2], reverse=yes_if("reverse"))
def test_resets_equal_separate_pieces(subject: Subject, reverse: bool) -> None:
    S = 8
    x = subject.exact(batch=1, S=S)
    marks = torch.zeros(1, S, dtype=torch.bool)
    marks[0, [2, 4] if reverse else [3, 5]] = True  # in reverse order a piece begins at its right end
    packed = subject(x, resets=marks, reverse=reverse)
    spans = [(0, 3), (3, 5), (5, S)]
    alone = []
    for a, b in reversed(spans) if reverse else spans:
        piece = subject.cut(x, a, b)
        if alone:
            piece = {name: t for name, t in piece.items() if name not in subject.kernel.states}
        alone.append(subject(piece, reverse=reverse))
    ys = [part["out"] for part in alone]
    expected = {**alone[-1], "out": torch.cat(ys[::-1] if reverse else ys, 1)}
    # A cache contains tokens before a reset, and an associative scan without a carry has other states than with one.
    if subject.kernel.name in ("attention", "attention_with_first", "associative_scan"):
        packed, expected = ({"out": out["out"]} for out in (packed, expected))
    bar = subject.kernel.exactness(subject.on, subject.on.exact, S)
    assert_close(with_gradients(packed, x), with_gradients(expected, x), bar)


@cases([k for k in KERNELS if k.reverse], EVERYWHERE, variants=CPU[:2], resets=[False, True])
def test_reverse_is_the_flipped_scan(subject: Subject, resets: bool) -> None:
    x = subject.exact(S=6)
    marks = reset_marks(2, 6) if resets else None
    out = subject(x, resets=marks, reverse=True)
    flipped = {name: t.flip(1) if name in subject.tokens() else t for name, t in x.items()}
    forward = subject(flipped, resets=None if marks is None else marks.flip(1))
    expected = {**forward, "out": forward["out"].flip(1)}
    bar = subject.kernel.exactness(subject.on, subject.on.exact, 9)
    assert_close(with_gradients(out, x), with_gradients(expected, x), bar)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in the interpreter warns about every NaN
@cases(
    [k for k in KERNELS if k.resets], EVERYWHERE, variants=CPU[:2], poison=[float("nan"), float("inf")],
    reverse=yes_if("reverse"), cuts=lambda kernel, on: [(), *CUTS] if on.backend != "triton" else [()],
)
def test_a_reset_stops_nan_and_inf(subject: Subject, poison: float, reverse: bool, cuts: Any) -> None:
    check_poison(subject, poison, reverse=reverse, cuts=cuts)


# ------------------------------------------------------------------------------------------------ nothing, and too much


@cases(
    KERNELS, CPU, state=yes_if("states"),
    size=lambda kernel, on: [(0, 3)] if kernel.min_length else [(0, 3), (2, 0), (0, 0)],
)
def test_nothing_has_gradients_of_zero(subject: Subject, size: tuple[int, int], state: bool) -> None:
    """A rank with an empty part of a batch takes part in training; an empty sequence passes the state on unchanged."""
    batch, S = size
    x = subject.exact(batch=batch, S=S, state=state)
    out = subject(x)
    assert out["out"].shape[:2] == size
    assert out["out"].requires_grad
    if state and S == 0:
        assert_equal({name: out[name] for name in subject.kernel.states}, {n: x[n] for n in subject.kernel.states})
    if subject.kernel.resets:
        marks = torch.zeros(batch, S, dtype=torch.bool)
        assert subject(x, resets=marks)["out"].shape == out["out"].shape
    out["out"].sum().backward()
    for name, leaf in floating(x).items():
        if name not in subject.kernel.states:
            assert leaf.grad is not None, name
            assert not leaf.grad.any(), name


ERRORS = [(kernel, *error) for kernel in KERNELS for error in kernel.errors]


@pytest.mark.parametrize(("kernel", "change", "message"), ERRORS, ids=[f"{e[0].name}-{e[2][:30]}" for e in ERRORS])
def test_errors_name_what_is_wrong(kernel: Kernel, change: Callable[[Tensors], dict[str, Any]], message: str) -> None:
    subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["torch"])
    x: dict[str, Any] = dict(subject.inputs())
    changed = change(x)
    tensors = x | {name: value for name, value in changed.items() if name in x}
    options = {name: value for name, value in changed.items() if name not in x}
    with pytest.raises(ValueError, match=message):
        subject(tensors, **options)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.states], ids=lambda kernel: kernel.name)
def test_states_are_real_where_imaginary_parts_would_be_lost(kernel: Kernel) -> None:
    subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["torch"])
    x = subject.inputs()
    for name in kernel.states:
        if x[name].is_floating_point():
            with pytest.raises(RunError, match="computes with real numbers; got complex"):
                subject({**x, name: x[name].cdouble()})


TRITON = [kernel for kernel in KERNELS if "triton" in kernel.implementations]


@pytest.mark.parametrize("kernel", TRITON, ids=lambda kernel: kernel.name)
def test_triton_reports_unsupported_calls(kernel: Kernel) -> None:
    def verdict(**facts: Any) -> Any:
        return kernels.why(kernel.name, **{"device": "cuda", **kernel.facts, **facts})[0]

    assert verdict().can
    for facts, reason in kernel.refused:
        assert not verdict(**facts).can
        assert reason in verdict(**facts).reason
    assert not verdict(device="cpu").can  # `auto` never selects the interpreter


@INTERPRETED
@pytest.mark.parametrize("kernel", TRITON, ids=lambda kernel: kernel.name)
def test_one_input_of_float64_is_enough(kernel: Kernel) -> None:
    """No Triton kernel computes in float64, so none may be selected, whichever input is float64."""
    subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["triton"])
    x = subject.exact()
    for name in x:
        if name not in kernel.added:
            with pytest.raises(BackendError, match="float64"):
                subject({**x, name: x[name].detach().double()})


# ------------------------------------------------------------------------------------------------ autocast, compilers


@cases(KERNELS, EVERYWHERE, variants=())
def test_autocast(subject: Subject) -> None:
    """Recurrences compute as without autocast; matrix products equal those of torch under autocast."""
    x = {name: t.detach().float() if t.is_floating_point() else t for name, t in subject.exact().items()}
    plain = subject(x)["out"]
    with torch.autocast(subject.on.device, dtype=torch.bfloat16):
        found = subject(x)["out"]
        by_torch = subject(x, backend="torch")["out"]
    assert found.dtype == by_torch.dtype or subject.on.name == "reference"
    if subject.kernel.name in ("mixing_conv", "headwise_linear", "attention", "attention_with_first"):
        # The factors of a few products are rounded.
        assert_close({"out": found.float()}, {"out": plain}, 2**-5)
    else:
        assert_close({"out": found}, {"out": plain}, subject.kernel.exactness(subject.on, torch.float32, 9))


def float32_leaves(subject: Subject, **sizes: int) -> Tensors:
    return {name: t.detach().float().requires_grad_() if t.is_floating_point() else t
            for name, t in subject.exact(**sizes).items()}


@cases(KERNELS, CPU[1:], variants=(), quick_for=COMPILED)
def test_compiled_in_one_graph(subject: Subject) -> None:
    """Both value and gradient."""
    x = float32_leaves(subject, S=10)

    def call(tensors: Tensors) -> Tensors:
        return subject(tensors)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    bar = subject.kernel.exactness(subject.on, torch.float32, 10)
    assert_close(with_gradients(compiled(x), x), with_gradients(call(x), x), bar)


# Ops below the first are compiled again for every length, as is torch's attention for some.
@cases(
    [k for k in KERNELS if k.name not in VARYING], ["torch"], variants=(), quick_for=COMPILED
)
def test_one_graph_for_all_lengths(subject: Subject) -> None:
    """There is one graph for the first length, and one for any other."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: subject(x), backend=backend, fullgraph=True)
    for length in (7, 9, 12, 40, 65, 130, 300):
        x = {name: t.detach() for name, t in float32_leaves(subject, S=length).items()}
        bar = subject.kernel.exactness(subject.on, torch.float32, length)
        assert_close(compiled(x), subject(x), bar)
    assert len(graphs) <= 2


class Caller(torch.nn.Module):
    """Wrap a call in a module for export."""

    def __init__(self, subject: Subject, resets: bool) -> None:
        super().__init__()
        self.subject, self.resets = subject, resets

    def forward(self, x: Tensors, marks: Tensor) -> Tensors:
        return self.subject(x, resets=marks if self.resets else None)


EXPORTED = [k for k in KERNELS if k.name not in VARYING]


@cases(EXPORTED, CPU[1:], variants=(), quick_for=COMPILED, resets=both_in_torch)
def test_one_export_serves_every_length(subject: Subject, resets: bool) -> None:
    check_export(subject, resets)


@pytest.mark.long
@cases(EXPORTED, CPU[:1], variants=(), resets=both_in_torch)
def test_one_export_of_the_definition_serves_every_length(subject: Subject, resets: bool) -> None:
    check_export(subject, resets)


def check_export(subject: Subject, resets: bool) -> None:
    """Assert that a program exported at one length computes others."""
    length = torch.export.Dim("length", min=2, max=4096)
    module = Caller(subject, resets)

    def given(S: int) -> tuple[Tensors, Tensor]:
        return {n: t.detach() for n, t in float32_leaves(subject, S=S).items()}, reset_marks(2, S)

    x, marks = given(9)
    sizes = ({name: {1: length} if name in subject.tokens() else None for name in x}, {1: length})
    with torch.no_grad():
        program = torch.export.export(module, (x, marks), dynamic_shapes=sizes, strict=False)
        if subject.on.name == "triton":
            graphs = [str(part.graph) for part in program.graph_module.modules() if hasattr(part, "graph")]
            assert any(f"{subject.kernel.name}_triton" in graph for graph in graphs)
        for S in (2, 20):
            bar = subject.kernel.exactness(subject.on, torch.float32, S)
            assert_close(program.module()(*given(S)), module(*given(S)), bar)


class Ops(TorchDispatchMode):
    """Record the calls of this package's ops while this mode is active, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "seqblocks":
            self.calls.append((func, tuple(a.clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


@cases(KERNELS, CPU[1:], variants=(), quick_for=COMPILED, resets=both_in_torch)
def test_its_ops_satisfy_opcheck(subject: Subject, resets: bool) -> None:
    """Checks schema, fake tensors and autograd of every op that a call makes, with the arguments of that call."""
    x = float32_leaves(subject, batch=1, S=5)
    with Ops() as ops, torch.enable_grad():
        subject(x, resets=reset_marks(1, 5) if resets else None)
    if subject.on.name == "triton":
        assert ops.calls
    for func, args in ops.calls:
        leaves = (a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(func, tuple(leaves))


@cases(KERNELS, CPU[1:], variants=(), resets=both_in_torch)
def test_gradients_of_several_losses_at_once(subject: Subject, resets: bool) -> None:
    """`is_grads_batched` stacks the gradients of separate calls."""
    x = float32_leaves(subject, batch=1, S=5)
    out = floating(subject(x, resets=reset_marks(1, 5) if resets else None))
    leaves = [t for t in x.values() if t.requires_grad]
    losses = [{name: draw(*t.shape, seed=seed).float() for name, t in out.items()} for seed in range(2)]
    pull = partial(
        torch.autograd.grad, [*out.values()], leaves, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    found = pull([torch.stack([loss[name] for loss in losses]) for name in out], is_grads_batched=True)
    for at, loss in enumerate(losses):
        torch.testing.assert_close([g[at] for g in found], [*pull([*loss.values()])], rtol=1e-5, atol=1e-6)


@cases(KERNELS, EVERYWHERE[1:], variants=("torch", "gpu"))
def test_activation_checkpointing(subject: Subject) -> None:
    """Saved tensors of a recomputed forward pass can be read only once."""
    x = float32_leaves(subject, batch=1, S=20 if subject.on.name == "torch" else 5)
    x = {name: t.detach().to(subject.on.device).requires_grad_(t.requires_grad) for name, t in x.items()}

    def gradients(out: Tensors) -> dict[str, Tensor]:
        return with_gradients({"out": out["out"]}, x)

    found = gradients(checkpoint(lambda: subject(x), use_reentrant=False, context_fn=dispatch.same_backend))
    assert_equal(found, gradients(subject(x)))


# ------------------------------------------------------------------------------------------------ transforms


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "dual": dual,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1])),
    "hessian": lambda f, x: torch.func.hessian(lambda s: f(s * x).square().sum())(torch.ones(())),
}


def of_the_first_input(subject: Subject, backend: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    x = {name: t.detach() for name, t in subject.exact().items() if name not in subject.kernel.states}
    name = subject.kernel.sequences[0]
    return lambda t: subject({**x, name: t}, backend=backend)["out"], x[name]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls torch's fused attention sample by sample
@pytest.mark.parametrize("transform", TRANSFORMS)
@cases(KERNELS, ["torch"], variants=())
def test_transforms(subject: Subject, transform: str) -> None:
    """In forward mode and torch.func, implementations with only reverse mode are skipped, and no derivative is silently
    zero."""
    found, expected = (
        TRANSFORMS[transform](*of_the_first_input(subject, backend)) for backend in ("auto", "reference")
    )  # fmt: skip
    assert_close({"out": found}, {"out": expected}, 10 * subject.kernel.exactness(subject.on, torch.float64, 9), 1.0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@cases([kernel for kernel in KERNELS if kernel.resets], ["torch"], variants=())
def test_vmap_over_resets(subject: Subject) -> None:
    """Values, which tell where resets must keep NaN from spreading, cannot be read in vmap."""
    x = {name: t.detach() for name, t in subject.exact(S=6).items()}
    resets, scales = torch.stack([reset_marks(2, 6), reset_marks(2, 6, 2)]), torch.tensor([1.0, 0.5])
    name = subject.kernel.sequences[0]

    def run(resets: Tensor, scale: Tensor) -> Tensor:
        return subject({**x, name: scale * x[name]}, backend="auto", resets=resets)["out"]

    found, expected = torch.vmap(run)(resets, scales), torch.stack([*map(run, resets, scales)])
    assert_close({"out": found}, {"out": expected}, 10 * subject.kernel.exactness(subject.on, torch.float64, 6), 1.0)


@cases([k for k in KERNELS if "torch" in k.reverse_mode_only], ["torch"], variants=())
def test_transforms_of_implementations_selected_by_name(subject: Subject) -> None:
    if subject.kernel.name == "mixing_conv":
        return
    f, x = of_the_first_input(subject, "torch")
    with pytest.raises(BackendError, match="reverse mode only"):
        dual(f, x)
    f(x)  # without a transform it runs
    dual(of_the_first_input(subject, "auto")[0], x)
    assert "reverse mode only" in dispatch.fallbacks()[subject.kernel.name]["torch"]


# ------------------------------------------------------------------------------------------------ devices


DEVICE_SHAPES: dict[str, dict[str, int]] = {
    "mlstm": {"batch": 4, "S": 300, "DK": 64, "DV": 64}, "slstm": {"batch": 17, "S": 200, "D": 64},
    "selective_scan": {"batch": 4, "S": 300, "E": 256, "N": 16}, "causal_conv": {"batch": 4, "S": 300, "D": 256},
    "centaurus": {"batch": 3, "S": 400, "H": 64, "N": 128}, "head_norm": {"batch": 4, "S": 300, "D": 768},
    "headwise_linear": {"batch": 4, "S": 300, "G": 64}, "linear_attention": {"batch": 4, "S": 300, "K": 64, "V": 64},
    "residual_norm": {"batch": 4, "S": 300, "D": 768},
}


def test_every_triton_kernel_has_a_shape_for_devices() -> None:
    assert {*DEVICE_SHAPES} == {kernel.name for kernel in TRITON}



def called_on_device(kernel: Kernel, dtype: torch.dtype) -> tuple[Subject, Tensors]:
    subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["gpu"])
    inputs = subject.inputs(**DEVICE_SHAPES[kernel.name])
    return subject, subject.leaves(inputs, Precision(dtype))


def gpu(function: Any) -> Any:
    function = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])(function)
    function = pytest.mark.parametrize("kernel", TRITON, ids=lambda kernel: kernel.name)(function)
    return on_device(function)


@gpu
def test_the_same_bits_every_time(kernel: Kernel, dtype: torch.dtype) -> None:
    """No sum depends on the order of programs: a race would show as a difference sooner or later."""
    subject, x = called_on_device(kernel, dtype)
    first = with_gradients(subject(x), x)
    for _ in range(20):
        assert_equal(with_gradients(subject(x), x), first)


@gpu
def test_auto_takes_it_and_a_compiler_sees_one_node(kernel: Kernel, dtype: torch.dtype) -> None:
    subject, x = called_on_device(kernel, dtype)
    x = {name: t.detach() for name, t in x.items()}
    expected = subject(x)
    assert kernels.why(kernel.name, device="cuda", **kernel.facts)[0].can
    assert_equal(subject(x, backend="auto"), expected)
    compiled = torch.compile(lambda x: subject(x, backend="auto"), fullgraph=True)
    assert_close(compiled(x), expected, kernel.exactness(subject.on, dtype, 1))


@gpu
def test_in_a_graph(kernel: Kernel, dtype: torch.dtype) -> None:
    """A CUDA graph replays what was captured, without waiting for the host."""
    subject, x = called_on_device(kernel, dtype)
    x = {name: t.detach() for name, t in x.items()}
    expected = subject(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = subject(x)
    captured["out"].zero_()
    graph.replay()
    assert_equal(captured, expected)
