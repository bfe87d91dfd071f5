"""choose: values and gradients against plain torch, the state law, packed sequences, streams, costs, programs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import seqblocks
from seqblocks import cost
from seqblocks.errors import RunError
from seqblocks.export.program import trace
from seqblocks.kernels import dispatch
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law

SPEC = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 6, as: h}
    - linear: {features: 1, as: r}
    - choose:
        from: h
        by: r
        CHOICE
        steps:
          - residual:
              - linear: {features: 18, as: [q, k, v]}
              - attention: {q: q, k: k, v: v, heads: 2, cache: 64}
              - linear: {features: 6, as: o}
              - calc: r * o
    - linear: {features: 4, name: head}
"""


def build(choice: str, dtype: torch.dtype = torch.float64, text: str = SPEC) -> SequenceModel:
    return seqblocks.build_text(text.replace("CHOICE", choice), dtype=dtype, seed=1)


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_definition(p: dict[str, Tensor], x: Tensor, top: float | None, above: float | None) -> Tensor:
    """Compute a model of SPEC on one sequence [seq, 6] in plain torch."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    h = linear("h", x)
    r = linear("r", h)
    scores = r[:, 0].tolist()
    order = sorted(range(len(scores)), key=lambda t: -scores[t])
    if top is None:
        chosen = [t for t, score in enumerate(scores) if score > (above or 0)]
    else:
        chosen = sorted(order[: int(top) if top >= 1 else max(1, math.floor(len(scores) * top))])
    rows = list(h)
    if chosen:
        part = h[chosen]
        made = linear("choose.residual.linear", part).split(6, -1)
        q, k, v = (each.unflatten(-1, (2, 3)).transpose(0, 1) for each in made)
        seen = torch.ones(len(chosen), len(chosen), dtype=torch.bool).tril()
        weights = (q @ k.mT / math.sqrt(3)).masked_fill(~seen, -math.inf).softmax(-1)
        o = linear("choose.residual.o", (weights @ v).transpose(0, 1).flatten(1))
        for at, row in zip(chosen, part + r[chosen] * o, strict=True):
            rows[at] = row
    return linear("head", torch.stack(rows))


CHOICES = {"top: 0.25": (0.25, None), "top: 1 / 3": (1 / 3, None), "top: 5": (5, None), "above: 0.1": (None, 0.1)}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_values_and_gradients(choice: str, marked: bool) -> None:
    """A packed sequence is computed by itself, also where its last tokens are skipped. Sums have errors of 1e-15."""
    model, x = build(choice), given(3, 21, 6).requires_grad_()
    starts = [[0, 1, 9, 20], [0, 13], [0]] if marked else [[0]] * 3
    resets = torch.zeros(3, 21, dtype=torch.bool)
    for row, firsts in enumerate(starts):
        resets[row, firsts] = True
    y, p = model(x, resets=resets if marked else None), dict(model.named_parameters())
    expected = torch.stack([
        torch.cat([by_definition(p, x[row, a:b], *CHOICES[choice])
                   for a, b in zip(firsts, [*firsts[1:], 21], strict=True)])
        for row, firsts in enumerate(starts)
    ])  # fmt: skip
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights, leaves = torch.randn_like(y), [x, *model.parameters()]
    found = torch.autograd.grad((y * weights).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("above", ["-100", "-0.2", "0.1", "100"])
def test_a_threshold_streams(above: str) -> None:
    model = build(f"above: {above}")
    check_law(model)
    check_law(model, resets=[(0, 0), (0, 5), (1, 11), (1, 22)])


def test_of_both_the_threshold_is_for_streams_and_evaluation() -> None:
    both, x = build("{top: 3, above: 0.1}".strip("{}").replace(", ", "\n        ")), given(2, 12, 6)
    best, above = build("top: 3"), build("above: 0.1")
    torch.testing.assert_close(both(x), best(x), rtol=0, atol=0)
    torch.testing.assert_close(both.eval()(x), above(x), rtol=0, atol=0)
    check_law(both)
    assert not torch.equal(best(x), above(x))


def test_equal_scores_go_to_the_first_token() -> None:
    model, x = build("top: 2"), given(1, 5, 6)
    with torch.no_grad():
        dict(model.named_parameters())["r.weight"].zero_()
        dict(model.named_parameters())["r.bias"].fill_(1.0)
        plain = build("above: 9")
        plain.load_state_dict(model.state_dict())
        changed = (model(x) != plain(x)).any(-1)
    assert changed.tolist() == [[True, True, False, False, False]]


def test_the_loop_over_all_tokens_is_the_definition() -> None:
    """Errors are those of sums in another order."""
    model, x = build("above: 0.1"), given(3, 17, 6)
    resets = torch.rand(3, 17, generator=torch.Generator().manual_seed(2)) < 0.2
    y, state = model(x, resets=resets, return_state=True)
    with dispatch.use_backend("reference"):
        z, other = model(x, resets=resets, return_state=True)
    torch.testing.assert_close(z, y, rtol=1e-12, atol=1e-12)
    for name, part in state["choose"]["residual"]["attention"].items():
        torch.testing.assert_close(other["choose"]["residual"]["attention"][name], part, rtol=1e-12, atol=1e-12)


def test_parameters_have_gradients_where_no_token_is_chosen() -> None:
    model = build("above: 100")
    model(given(2, 5, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p is not dict(model.named_parameters())["r.weight"])
    assert dict(model.named_parameters())["choose.residual.o.weight"].grad.abs().sum() == 0


def test_what_is_best_of_a_sequence_does_not_stream() -> None:
    model = build("top: 0.5")
    with pytest.raises(RunError, match="by the scores of the whole sequence: streams need a threshold"):
        model.init_state(1)
    assert not model(given(2, 0, 6)).numel()


def test_costs_are_those_of_the_chosen_tokens() -> None:
    """Of 8 tokens 2 are chosen. The steps inside cost 18 * 6 + 6 * 6 for maps and 6 for r * o, and for attention 2 x 6
    for each of (1 + 2) pairs; those outside 6 * 6, 6 and 6 * 4."""

    def macs(choice: str, tokens: int) -> float | None:
        text = SPEC.replace("CHOICE", choice).replace("{features: 6}\n", "{features: 6, length: 8}\n", 1)
        return cost.input_macs(seqblocks.build_text(text).spec.graph, tokens)

    outside = 8 * (36 + 6 + 24)
    whole = macs("above: 0", 8)
    assert macs("top: 0.25", 8) == outside + 2 * (108 + 36 + 6) + 3 * 12
    assert whole == outside + 8 * (108 + 36 + 6) + 36 * 12
    graph = build("top: 0.25").spec.graph
    assert cost.input_macs(graph, 8) == macs("top: 0.25", 8) == 8 * (cost.macs(graph, 8) or 0)


@pytest.mark.slow
def test_compiled_and_exported() -> None:
    """A whole sequence is one program if `top` says how many tokens are chosen, and so is a token of a stream."""
    x, best, above = given(2, 12, 6), build("top: 0.25"), build("above: 0.1")
    torch.testing.assert_close(torch.compile(best, backend="eager", fullgraph=True)(x), best(x), rtol=0, atol=0)
    program = trace(best.eval(), "forward").program.module()
    torch.testing.assert_close(program(given(2, 20, 6)), best(given(2, 20, 6)), rtol=1e-12, atol=1e-12)
    step = trace(above.eval(), "step").program.module()
    state, other = above.init_state(3), above.init_state(3)
    for t in range(12):
        token = given(3, 12, 6)[:, t]
        y, state = step(token, state)
        z, other = above.step(token, other)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    with pytest.raises(RunError, match="can only be exported for a fixed number of tokens"):
        trace(above, "forward")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True])
def test_code_is_not_compiled_for_each_number_of_chosen_tokens(packed: bool) -> None:
    """24 batches of other sizes need one graph each time, and fewer programs than torch's limit."""
    model = build("above: 0.1").eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for at in range(24):
            x = given(1 + at % 5, 2 + 7 * at % 23, 6)
            resets = torch.rand(x.shape[:2]) < 0.3 if packed else None
            for values in (x, 0 * x):
                y = model(values, resets=resets)
                torch.testing.assert_close(compiled(values, resets=resets), y, rtol=1e-12, atol=1e-12)


def test_states_begin_in_the_dtype_of_the_model() -> None:
    """The first parameter of the steps is in float32, as all of its kind are in a model of 16 bits."""
    qkv, attention = "{linear: {features: 18, as: [q, k, v]}}", "{attention: {q: q, k: k, v: v, heads: 2, cache: 8}}"
    steps = f"{{ssm: {{state: 2, dt: input}}}}, {qkv}, {attention}, {{linear: {{features: 6, as: o}}}}, {{calc: r * o}}"
    text = SPEC[: SPEC.index("        steps:\n          - residual")] + f"        steps: [{steps}]\n"
    model = build("above: 1000", torch.bfloat16, text)  # no token is chosen
    _, state = model(given(2, 5, 6).bfloat16(), return_state=True)
    expected = tree_map(lambda s: s.dtype, model.init_state(2))
    assert tree_map(lambda s: s.dtype, state) == expected


CONTEXT = """
seqblocks: 1
model:
  inputs: {x: {features: 6}, notes: {features: 5}}
  steps:
    - linear: {from: notes, features: 6, as: memory}
    - pool: {mode: mean, as: mean}
    - linear: {from: x, features: 6, as: h}
    - linear: {features: 1, as: r}
    - choose:
        from: h
        by: r
        CHOICE
        steps:
          - linear: {features: 6, as: q}
          - cross_attention: {q: q, k: memory, v: memory, heads: 2, as: read}
          - calc: {y: input + r * (read + mean)}
          - conv1d: {features: 6, kernel: 2, bias: false, name: conv}
"""


@pytest.mark.parametrize("choice", CHOICES)
def test_the_steps_read_a_context(choice: str) -> None:
    """Each chosen token reads all of the context, computed token by token. Sums have errors of 1e-15."""
    model, x, notes = build(choice, text=CONTEXT), given(3, 11, 6).requires_grad_(), given(3, 7, 5).requires_grad_()
    p, rows = dict(model.named_parameters()), []
    for tokens, read in zip(x, notes, strict=True):
        memory = read @ p["memory.weight"].T + p["memory.bias"]
        h = tokens @ p["h.weight"].T + p["h.bias"]
        r = (h @ p["r.weight"].T + p["r.bias"])[:, 0]
        top, above = CHOICES[choice]
        order = r.argsort(descending=True).tolist()
        count = 0 if top is None else int(top) if top >= 1 else max(1, math.floor(11 * top))
        chosen = sorted(order[:count]) if top else [t for t in range(11) if r[t] > (above or 0)]
        out, before = list(h), torch.zeros(6, dtype=torch.float64)
        for t in chosen:
            q = h[t] @ p["choose.q.weight"].T + p["choose.q.bias"]
            halves = zip(memory.split(3, 1), q.split(3), strict=True)
            heads = [(part @ own / math.sqrt(3)).softmax(0) @ part for part, own in halves]
            y = h[t] + r[t] * (torch.cat(heads) + memory.mean(0))
            weight = p["choose.conv.weight"]
            out[t], before = weight[..., 0] @ before + weight[..., 1] @ y, y
        rows.append(torch.stack(out))
    y, expected = model(x=x, notes=notes), torch.stack(rows)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    leaves, weights = [x, notes, *p.values()], torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


def test_a_threshold_streams_beside_a_context() -> None:
    model, x, notes = build("above: 0.1", text=CONTEXT), given(3, 11, 6), given(3, 7, 5)
    check_law(model)
    check_law(model, resets=[(0, 0), (0, 5), (1, 11), (1, 22)])
    y = model(x=x, notes=notes)
    with dispatch.use_backend("reference"):
        torch.testing.assert_close(model(x=x, notes=notes), y, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_step_beside_a_context_is_exported() -> None:
    model, x, notes = build("above: 0.1", text=CONTEXT).eval(), given(3, 11, 6), given(3, 7, 5)
    step = trace(model, "step").program.module()
    state = other = model.init_state(3, notes=notes)
    for t in range(11):
        y, state = step(x[:, t], state)
        z, other = model.step(x[:, t], other)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def test_a_choice_at_another_rate_streams() -> None:
    slow = SPEC.replace("    - linear: {features: 6, as: h}", "    - downsample: 2\n    - linear: {features: 6, as: h}")
    check_law(build("above: 0.1", text=f"{slow}    - upsample: 2\n"))
