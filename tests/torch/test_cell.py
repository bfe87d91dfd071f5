"""cell: values and gradients against loops, the state law, what runs in which way, and the memory of training."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from benchmarks.memory import measure
from seqblocks.export.program import trace
from seqblocks.kernels import dispatch
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.cell import Cell
from seqblocks.testing import check_law

LINEAR = """
- linear: {features: 12, as: {a: 4, b: 4, c: 4}}
- cell:
    from: b
    state: {s: {features: 4, start: 0.5, learned: true}, t: {features: 4, start: 0.25}}
    steps:
      - calc: {s: "sigmoid(a) * s + b", t: "0.5 * t - s / 4", y: "c * s + t"}
- linear: {features: 5, name: head}
"""
CURVED = """
- linear: {features: 5, as: u}
- cell:
    state: {h: {features: 5, start: "normal(0, 1)", learned: true}, last: 5}
    steps:
      - linear: {from: [input, h, last], features: 5, as: pre}
      - tanh: {as: h}
      - identity: {from: input, as: last}
      - residual: {from: h, steps: [{linear: {features: 5, bias: false, name: inner}}, silu]}
- linear: {features: 5, name: head}
"""
DELTA = """
- linear: {features: 14, as: {q: 4, k: 4, v: 4, beta: 2}}
- sigmoid: {from: beta, as: b}
- repeat_heads: {heads: 2, times: 2, as: rate}
- cell:
    from: q
    state: {S: 8}
    steps:
      - l2_norm: {from: k, heads: 2, as: key}
      - matrix_product: {from: key, matrix: S, heads: 2, as: seen}
      - calc: {e: "rate * (v - seen)"}
      - outer_product: {from: e, with: key, heads: 2, as: change}
      - calc: {S: "S + change"}
      - matrix_product: {from: q, matrix: S, heads: 2}
- linear: {features: 5, name: head}
"""
CELLS = {"linear": LINEAR, "curved": CURVED, "delta": DELTA}
COMPILED = ["delta", *(pytest.param(name, marks=pytest.mark.long) for name in ("linear", "curved"))]


def build(steps: str, dtype: torch.dtype = torch.float64, chunk: int | None = None, **options: Any) -> SequenceModel:
    steps = steps if chunk is None else steps.replace("- cell:\n", f"- cell:\n    chunk: {chunk}\n")
    lines = "\n".join(f"    {line}" for line in steps.splitlines())
    text = f"seqblocks: 1\nmodel:\n  input: {{features: 3}}\n  steps:\n{lines}\n"
    return seqblocks.build_text(text, dtype=dtype, **options)


def cell_of(model: nn.Module) -> Cell:
    (found,) = (each for each in model.modules() if isinstance(each, Cell))
    return found


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_loop(name: str, p: dict[str, Tensor], x: Tensor, first: Tensor) -> Tensor:
    """Compute a model of CELLS by its definition. first [batch, seq]: whether a token begins a sequence."""
    z, out = x @ p["linear.weight"].T + p["linear.bias"] if name != "curved" else x, []
    if name == "curved":
        z = x @ p["u.weight"].T + p["u.bias"]
    starts = {
        "linear": lambda: [p["cell.start_s"].expand(len(x), 4), torch.full((len(x), 4), 0.25, dtype=x.dtype)],
        "curved": lambda: [p["cell.start_h"].expand(len(x), 5), torch.zeros(len(x), 5, dtype=x.dtype)],
        "delta": lambda: [torch.zeros(len(x), 2, 2, 2, dtype=x.dtype)],
    }[name]()
    states = starts
    for t in range(x.shape[1]):
        new = first[:, t]
        states = [torch.where(new.view(-1, *[1] * (s.dim() - 1)), a, s) for a, s in zip(starts, states, strict=True)]
        token = z[:, t]
        if name == "linear":
            a, b, c = token.split(4, -1)
            s = a.sigmoid() * states[0] + b
            states = [s, 0.5 * states[1] - s / 4]
            y = c * s + states[1]
        elif name == "curved":
            h = torch.cat([token, *states], -1) @ p["cell.pre.weight"].T + p["cell.pre.bias"]
            states = [h.tanh(), token]
            inner = states[0] @ p["cell.residual.inner.weight"].T
            y = states[0] + inner * inner.sigmoid()
        else:
            q, k, v, beta = token.split([4, 4, 4, 2], -1)
            q, k, v = (each.unflatten(-1, (2, 2)) for each in (q, k, v))
            k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            e = beta.sigmoid().unsqueeze(-1) * (v - torch.einsum("bhij,bhj->bhi", states[0], k))
            states = [states[0] + torch.einsum("bhi,bhj->bhij", e, k)]
            y = torch.einsum("bhij,bhj->bhi", states[0], q).flatten(1)
        out.append(y @ p["head.weight"].T + p["head.bias"])
    return torch.stack(out, 1)


@pytest.mark.parametrize("chunk", [None, 0, 7])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients(name: str, marked: bool, chunk: int | None) -> None:
    """90 tokens: a loop is divided into parts by default. The sums have rounding errors of about 1e-14."""
    model, x = build(CELLS[name], chunk=chunk), given(2, 90, 3).requires_grad_()
    resets = torch.rand(2, 90, generator=torch.Generator().manual_seed(1)) < 0.1
    first = resets if marked else torch.zeros_like(resets)
    y, expected = model(x, resets=resets if marked else None), by_loop(name, dict(model.named_parameters()), x, first)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    weights, leaves = torch.randn_like(y), [x, *model.parameters()]
    found = torch.autograd.grad((y * weights).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    with dispatch.use_backend("reference"):
        torch.testing.assert_close(model(x, resets=resets if marked else None), y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", CELLS)
def test_the_law(name: str, chunk: int | None) -> None:
    check_law(build(CELLS[name], chunk=chunk))


def test_which_steps_run_in_a_loop() -> None:
    names = {}
    for name, steps in CELLS.items():
        parts = cell_of(build(steps))._parts
        divided = (parts.before, parts.loop, parts.after)
        names[name] = (parts.groups, *([node.name for node in some] for some in divided))
    assert names == {
        "linear": ((("s", "t"),), [], ["s", "t"], ["y"]),
        "curved": (None, ["last"], ["pre", "h"], ["residual"]),
        "delta": (None, ["key"], ["seen", "e", "change", "S"], ["matrix_product"]),
    }


@pytest.mark.parametrize("name", CELLS)
def test_packed_sequences(name: str) -> None:
    model, x = build(CELLS[name]), given(1, 12, 3)
    alone = torch.cat([model(x[:, :5]), model(x[:, 5:])], 1)
    y = model(x, cu_seqlens=torch.tensor([0, 5, 12]))
    torch.testing.assert_close(y, alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_stream_is_planned(name: str) -> None:
    """Its steps are those of the model without a module of the cell, and begin with the learned start."""
    model, x = build(CELLS[name]).eval(), given(2, 4, 3)
    with torch.no_grad():
        expected, last = model(x, return_state=True)
        state = model.init_state(2)
        for t in range(4):
            y, state = model.step(x[:, t], state)
            torch.testing.assert_close(y, expected[:, t], rtol=1e-11, atol=1e-12)
        assert model.token_plan is not None
        assert not model.token_plan.calls_modules
    for name, part in last["cell"].items():
        torch.testing.assert_close(state["cell"][name], part, rtol=1e-11, atol=1e-12)


def test_states_are_values_of_their_own() -> None:
    """The new state is the input itself here: changing one must not change the other."""
    steps = "{add: {with: s, as: y}}, {identity: {from: input, as: s}}, {identity: {from: y}}"
    model = build(f"- cell: {{state: {{s: 3}}, steps: [{steps}]}}")
    x = given(2, 3)
    with torch.no_grad():
        _, state = model.eval().step(x, model.init_state(2))
        x.zero_()
        assert state["cell"]["s"].abs().min() > 0
        x = given(2, 1, 3)
        _, state = model(x, return_state=True)
        x.zero_()
        assert state["cell"]["s"].abs().min() > 0


def test_a_learned_start_gets_gradients_through_a_stream() -> None:
    model, x = build(LINEAR), given(2, 3, 3)
    whole = torch.autograd.grad(model(x).square().sum(), cell_of(model).start_s)
    y, state = model.step(x[:, 0], model.init_state(2))
    total = y.square().sum()
    for t in (1, 2):
        y, state = model.step(x[:, t], state)
        total = total + y.square().sum()
    torch.testing.assert_close(torch.autograd.grad(total, cell_of(model).start_s), whole)


HALF = "cell: {state: {s: {features: 3, start: 1, learned: true}}, steps: [{calc: {s: 's / 2 + input'}}]}"


def test_a_scan_in_both_directions() -> None:
    """Each direction owns a start."""
    model = build(f"- scan: {{order: [forward, reverse], own: all, merge: concat, steps: [{{{HALF}}}]}}")
    plain, x = build(f"- {HALF}"), given(2, 9, 3)
    found = dict(model.named_parameters())
    assert {*found} == {"scan.fwd.cell.start_s", "scan.rev.cell.start_s"}
    with torch.no_grad():
        found["scan.rev.cell.start_s"].fill_(-2)
        forward = plain(x)
        cell_of(plain).start_s.fill_(-2)
        backward = plain(x.flip(1)).flip(1)
    torch.testing.assert_close(model(x), torch.cat([forward, backward], -1), rtol=1e-12, atol=1e-12)


def test_some_directions_own_the_start() -> None:
    model = build(f"- scan: {{order: [forward, reverse], own: [cell.start_s], steps: [{{{HALF}}}]}}")
    assert len(list(model.parameters())) == 2
    check_law(build(f"- scan: {{order: [forward], steps: [{{{HALF}}}]}}"))
    y = model(given(2, 9, 3))
    assert all(each is not None for each in torch.autograd.grad(y.sum(), [*model.parameters()]))


def test_shared_parameters() -> None:
    model = build(f"- {HALF[:-1]}, name: one}}\n- {HALF[:-1]}, name: two, share: one}}")
    (start,) = model.parameters()
    x = given(2, 5, 3)
    y = model(x)
    assert torch.autograd.grad(y.sum(), start)[0].abs().min() > 0
    plain = build(f"- {HALF}")
    torch.testing.assert_close(y, plain(plain(x)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "compiles"), [(torch.float64, False), (torch.bfloat16, False), (torch.float64, True)]
)
@torch.no_grad()
def test_a_stream_begins_with_the_start_of_another_cell(dtype: torch.dtype, compiles: bool) -> None:
    """Also in planned and compiled steps, which use it as it is now: changed in place, by `.data`, or replaced.

    All numbers are sums of few powers of two, which no dtype rounds.
    """
    cells = f"- {HALF[:-1]}, name: one}}\n- {HALF[:-1]}, name: two, share: one}}\n"
    model = build(f"{cells}- linear: {{features: 3, bias: false}}", dtype).eval()
    model.linear.weight.copy_(torch.eye(3))
    x = torch.ones(2, 3, 3, dtype=dtype)
    step = torch.compile(model.step, backend="eager") if compiles else model.step

    def assert_equal_steps(start: float) -> None:
        state, made = model.init_state(2), []
        for t in range(3):
            y, state = step(x[:, t], state)
            made.append(y)
        one = [start / 2 + 1, start / 4 + 1.5, start / 8 + 1.75]
        two = [start / 2 + one[0], start / 4 + one[0] / 2 + one[1], start / 8 + one[0] / 4 + one[1] / 2 + one[2]]
        assert [float(y[0, 0]) for y in made] == two
        assert torch.equal(torch.stack(made, 1), model(x))
        assert (model.traced_plan if compiles else model.token_plan) is not None

    assert_equal_steps(1.0)
    model.one.start_s.fill_(4.0)
    assert_equal_steps(4.0)
    model.one.start_s.data.fill_(-2.0)
    assert_equal_steps(-2.0)
    model.one.start_s = nn.Parameter(torch.full((3,), 8.0, dtype=dtype))
    assert_equal_steps(8.0)


def test_sixteen_bits() -> None:
    """States are float32, and so are sums of thousands of small numbers."""
    steps = "{calc: {s: s + input}}, {linear: {from: s, features: 3}}"
    model = build(f"- cell: {{state: {{s: 3}}, steps: [{steps}]}}", torch.bfloat16)
    y, state = model(torch.full((1, 4000, 3), 1e-3, dtype=torch.bfloat16), return_state=True)
    assert y.dtype == torch.bfloat16
    assert state["cell"]["s"].dtype == torch.float32
    torch.testing.assert_close(state["cell"]["s"], torch.full((1, 3), 4.0), rtol=5e-3, atol=0)  # 1e-3 in bfloat16


def test_a_step_that_is_replaced_or_hooked_runs_as_a_module() -> None:
    model, x = build(CURVED), given(2, 6, 3)
    expected, seen = model(x), []
    handle = model.get_submodule("cell.pre").register_forward_hook(lambda _module, given, y: seen.append(y.shape))
    torch.testing.assert_close(model(x), expected)
    handle.remove()
    assert seen == [(2, 1, 5)] * 6
    linear = nn.Linear(15, 5).double()
    linear.load_state_dict(model.get_submodule("cell.pre").state_dict())
    model.cell.pre = linear
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        _, state = model.eval()(x[:, :5], return_state=True)
        torch.testing.assert_close(model.step(x[:, 5], state)[0], expected[:, 5])


def test_copies_pickles_and_files() -> None:
    model, x = build(DELTA), given(2, 5, 3)
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_an_exported_program_takes_any_length(name: str) -> None:
    model = build(CELLS[name], torch.float32).eval()
    program = trace(model, "forward").program.module()
    for length in (2, 11):
        x = given(2, length, 3).float()
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    model, x = build(CELLS[name], torch.float32), given(2, 5, 3).float()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x), rtol=1e-4, atol=1e-5)


def test_transforms() -> None:
    """torch.func has no checkpointing: gradients are the same without it."""
    model, x = build(DELTA), given(2, 70, 3)
    p = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(p)
    plain = torch.autograd.grad(model(x).square().sum(), [*p.values()])
    for mine, theirs in zip(found.values(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_dropout_in_a_part_that_is_computed_again() -> None:
    """The same numbers are dropped again: the gradient of the input is that of the output, scale and mask."""
    steps = "{dropout: {p: 0.5, as: d}}, {calc: {s: 0 * tanh(s) + d}}"
    model = build(f"- cell: {{state: {{s: 3}}, chunk: 4, steps: [{steps}]}}")
    x = given(2, 30, 3).requires_grad_()
    y = model.train()(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)


def test_empty_sequences() -> None:
    model = build(LINEAR)
    y, state = model(given(2, 0, 3), return_state=True)
    assert y.shape == (2, 0, 5)
    x = given(2, 4, 3)
    torch.testing.assert_close(model(x, state=state), model(x))


def peak(steps: str, length: int, chunk: int | None = None) -> tuple[int, int]:
    """Return the memory of a training step as measured and as estimated."""
    model = build(steps, torch.float32, chunk)
    found = seqblocks.memory(model.spec, batch=2, length=length, optimizer="sgd").peak_bytes
    return measure(model, 2, length, optimizer="sgd", checkpoint="none").peak, found


LARGE = DELTA.replace("features: 14", "features: 50").replace("q: 4, k: 4, v: 4", "q: 16, k: 16, v: 16")
LARGE = LARGE.replace("times: 2", "times: 8").replace("S: 8", "S: 128")


@pytest.mark.slow
def test_memory_grows_with_the_square_root_of_the_length() -> None:
    """Four times the tokens need twice the states: those between the parts, and those of one part."""
    torch.set_num_threads(1)
    short, long = peak(LARGE, 100), peak(LARGE, 400)
    for real, estimated in (short, long):
        assert estimated == pytest.approx(real, rel=0.2)
    inputs = 2 * 50 * 4  # bytes a token of the projections, of which there are about three copies
    assert long[0] - 3 * 400 * inputs < 2.3 * (short[0] - 3 * 100 * inputs)
    everything, _ = peak(LARGE, 400, 0)
    assert everything > 3 * long[0]
