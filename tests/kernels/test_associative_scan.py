"""Properties specific to the associative scan: various algebras, including the mLSTM.

Common properties are in test_conformance.py, official numbers in tests/torch/test_golden_memoroid.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from seqblocks.kernels import Memoroid, MLSTMState, associative_scan, mlstm, mlstm_memoroid
from seqblocks.kernels.mlstm.memoroid import MLSTMElement, _scan, elements
from seqblocks.kernels.mlstm.memoroid import combine as mlstm_combine
from tests.kernels.conformance import draw, marked
from tests.kernels.families import Pair, linear, logarithmic
from tests.kernels.mlstm import mlstm_inputs

# float64: a tree of log2(300) combinations against a chain of 300, each with a few roundings of 2^-52 at values of
# order 1e2.
ROUNDING = 1e-10


def sums(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the combination of linear attention."""
    return {key: a[key] + b[key] for key in a}


def an_mlstm(S: int, batch: int = 2, dtype: Any = torch.float64, scale: float = 2.0) -> list[Tensor]:
    """Return q, k, v, i, f."""
    x = mlstm_inputs(batch, S, scale=scale)
    return [x[name].to(dtype).requires_grad_() for name in "qkvif"]


def algebras(S: int) -> dict[str, tuple[Any, Any, Any]]:
    """Return combine, elements and initial carry of each algebra."""
    mixed = torch.polar(torch.rand(2, S, 3, dtype=torch.float64), draw(2, S, 3))
    cell = elements(tuple(an_mlstm(S)))
    return {
        "linear": (linear, Pair(draw(2, S, 3).sigmoid(), draw(2, S, 3, seed=1)), Pair(torch.ones(2, 3), draw(2, 3))),
        "complex": (linear, Pair(mixed, mixed.conj()), None),
        "logarithmic": (
            logarithmic,
            Pair(-draw(2, S, 3).exp(), draw(2, S, 3, seed=1)),
            Pair(torch.zeros(2, 3), torch.full((2, 3), -torch.inf)),
        ),
        "sums": (sums, {"kv": draw(2, S, 3, 4), "k": draw(2, S, 3)}, None),
        "mlstm": (mlstm_combine, cell, MLSTMElement(*(torch.zeros_like(t[:, 0]) for t in cell))),
        "a bare tensor": (torch.maximum, draw(2, S), None),
    }


def assert_close(a: Any, b: Any, bar: float = ROUNDING) -> None:
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("name", algebras(1))
def test_combine_is_associative(name: str) -> None:
    combine, tree, _ = algebras(3)[name]
    a, b, c = (pytree.tree_map(lambda x, t=t: x[:, t : t + 1], tree) for t in range(3))
    assert_close(combine(combine(a, b), c), combine(a, combine(b, c)))


@pytest.mark.parametrize("name", algebras(1))
@settings(max_examples=10)
@given(
    seq=st.integers(1, 300),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 299)), max_size=4),
    reverse=st.booleans(),
    carried=st.booleans(),
)
def test_the_tree_equals_the_chain(
    name: str, seq: int, marks: list[tuple[int, int]], reverse: bool, carried: bool
) -> None:
    combine, tree, initial = algebras(seq)[name]
    options: dict[str, Any] = {"initial": initial if carried else None, "reverse": reverse}
    options["resets"] = marked(seq, marks) if marks else None
    assert_close(*(associative_scan(combine, tree, backend=backend, **options) for backend in ("torch", "reference")))


def test_a_reset_starts_afresh_without_nan() -> None:
    """An infinite carry before a reset has no effect, neither on values nor on gradients."""
    tree = Pair(-draw(1, 6, 2).exp().requires_grad_(), draw(1, 6, 2, seed=1).requires_grad_())
    carry = Pair(torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), -torch.inf, dtype=torch.float64))
    resets = torch.tensor([[False, False, False, True, False, False]])
    states, _ = associative_scan(logarithmic, tree, initial=carry, resets=resets)
    fresh, _ = associative_scan(logarithmic, Pair(tree.decay[:, 3:], tree.value[:, 3:]))
    assert_close(states.value[:, 3:], fresh.value)
    states.value.sum().backward()
    assert torch.isfinite(tree.value.grad).all()
    assert (states.value[:, 0] == tree.value[:, 0]).all()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    seq=st.integers(1, 150),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 149)), max_size=4),
    reverse=st.booleans(),
    carried=st.booleans(),
)
def test_the_mlstm_is_one(seq: int, marks: list[tuple[int, int]], reverse: bool, carried: bool) -> None:
    """Compared with the recurrent definition in value, state and gradient. Different initial stabilisers change results
    by about the normaliser's eps: 1e-6 (and 3e-6 in the gradients, as for the kernel's own implementations)."""
    x = an_mlstm(seq)
    state = MLSTMState(draw(2, 2, 4, 3), draw(2, 2, 4), draw(2, 2)) if carried else None
    options: dict[str, Any] = {"state": state, "return_state": True, "reverse": reverse}
    options["resets"] = marked(seq, marks) if marks else None
    pairs = []
    for h, last in (mlstm_memoroid(*x, **options), mlstm(*x, **options, backend="reference")):
        scaled = [last.C * last.m.exp()[..., None, None], last.n * last.m.exp()[..., None]]
        pairs.append([h, *scaled, *torch.autograd.grad(h.square().sum(), x)])
    assert_close(pairs[0], pairs[1], 3e-6)


def test_closed_input_gates_write_nothing() -> None:
    """Some pairs that the scan combines first have no open gate."""
    x = an_mlstm(13)
    x[3] = x[3].detach().index_fill(1, torch.tensor([0, 1, 4, 5, 6, 7]), -math.inf).requires_grad_()
    found, expected = (run(*x, eps=0.0) for run in (mlstm_memoroid, partial(mlstm, backend="reference")))
    gradients = [torch.autograd.grad(h.square().sum(), x) for h in (found, expected)]
    assert_close([found, *gradients[0]], [expected, *gradients[1]], 1e-10)


def test_extreme_gates_and_low_precision() -> None:
    for scale in (100.0, -100.0):
        x = an_mlstm(50, dtype=torch.float32)
        x[3], x[4] = (torch.full_like(t, scale).requires_grad_() for t in x[3:])
        for readout in ("paper", "unit_floor"):
            h, last = mlstm_memoroid(*x, return_state=True, readout=readout)
            grads = torch.autograd.grad(h.sum(), x)
            assert all(torch.isfinite(t).all() for t in (h, *last, *grads))
    for dtype in (torch.bfloat16, torch.float16):  # float32 inside: only inputs and outputs are rounded
        x = an_mlstm(50, dtype=dtype)
        h, last = mlstm_memoroid(*x, return_state=True)
        assert (h.dtype, last.C.dtype, last.m.dtype) == (dtype, torch.float32, torch.float32)
        assert torch.equal(h, mlstm_memoroid(*(t.float() for t in x)).to(dtype))


def test_a_user_defined_memoroid() -> None:
    """Linear attention with a running normaliser: whole = pieces, and a reset = a new start."""
    attention = Memoroid(
        elements=lambda x: {"kv": x[1].unsqueeze(-1) * x[2].unsqueeze(-2), "k": x[1]},
        combine=sums,
        read=lambda s, x: (x[0].unsqueeze(-1) * s["kv"]).sum(-2) / (x[0] * s["k"]).sum(-1, keepdim=True),
        initial=lambda batch: {"kv": torch.zeros(batch, 4, 3), "k": torch.zeros(batch, 4)},
    )
    q, k = (draw(2, 12, 4, seed=s).exp() for s in (1, 2))
    x = (q, k, draw(2, 12, 3))
    whole, last = attention(x, return_state=True)
    first, state = attention([t[:, :5] for t in x], return_state=True)
    second, end = attention([t[:, 5:] for t in x], state=state, return_state=True)
    assert_close((torch.cat([first, second], 1), end), (whole, last))
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[:, 5] = True
    assert_close(attention(x, resets=resets)[:, 5:], attention([t[:, 5:] for t in x]))


@settings(max_examples=30)
@given(
    seq=st.integers(1, 40),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 39)), max_size=4),
    scale=st.sampled_from([2.0, 200.0]),
)
def test_compiled_code_runs_the_same_with_a_derivative_by_hand(
    seq: int, marks: list[tuple[int, int]], scale: float
) -> None:
    """Also where one of the exponents is -inf, and where across a reset it would be above 1."""
    cell = MLSTMElement(*(t.detach().requires_grad_() for t in elements(tuple(an_mlstm(seq, scale=scale)))))
    resets = marked(seq, marks) if marks else None
    pairs = []
    for states in (_scan(*cell, resets), associative_scan(mlstm_combine, cell, resets=resets)[0]):
        weighted = (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in states)
        pairs.append([*states, *torch.autograd.grad(sum(x.sum() for x in weighted), cell)])
    assert_close(*pairs)


def test_equal_exponents_share_the_gradient_of_their_maximum() -> None:
    """The chain does the same; a tree shares it in other pairs."""
    cell = MLSTMElement(draw(1, 5, 2) * 0, draw(1, 5, 2, 4, 3), draw(1, 5, 2, 4), draw(1, 5, 2) * 0)
    cell = MLSTMElement(*(t.requires_grad_() for t in cell))
    chain, _ = associative_scan(mlstm_combine, cell, backend="reference")
    both = (_scan(*cell, None), chain)
    assert_close(*(torch.autograd.grad(sum((x * x + x).sum() for x in states), cell) for states in both))


def test_the_op_of_compiled_code_satisfies_opcheck() -> None:
    for seq, resets in ((1, None), (6, torch.zeros(2, 6, dtype=torch.bool))):
        cell = [t.detach().requires_grad_() for t in elements(tuple(an_mlstm(seq)))]
        torch.library.opcheck(_scan.traced, (*cell, resets))


class Caller(torch.nn.Module):
    def forward(self, resets: Tensor, state: Any, *x: Tensor) -> Any:
        return mlstm_memoroid(*x, resets=resets, state=state, return_state=True)


def test_one_export_serves_every_length() -> None:
    def call(S: int) -> tuple[Any, ...]:
        state = [draw(2, 2, 4, 3), draw(2, 2, 4), draw(2, 2)]
        return marked(S, [(0, S // 2)]), state, *(t.detach() for t in an_mlstm(S))

    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    sizes = (length, [None] * 3, (length,) * 5)
    program = torch.export.export(Caller(), call(9), dynamic_shapes=sizes, strict=False).module()
    for S in (2, 16, 100):
        assert_close(program(*call(S)), Caller()(*call(S)))


@pytest.mark.parametrize("combine", [torch.maximum, lambda a, b: a + b])
def test_a_user_defined_operator_compiles(combine: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: associative_scan(combine, x)[0], fullgraph=True, backend="aot_eager")
    x = draw(2, 5)
    assert_close(compiled(x), associative_scan(combine, x)[0])


def test_errors_show_trees() -> None:
    two = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"like one element, \{'a': \[2\], 'b': \[2\]\}; got \{'b': \[2\]\}"):
        associative_scan(sums, two, initial={"b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"return a tree like the elements, .*; got None"):
        associative_scan(lambda a, b: None, two)
    with pytest.raises(ValueError, match=r"return a tree like the elements, .*; got \{'a': "):
        associative_scan(lambda a, b: {"a": a["a"] + b["a"]}, two)
