"""Arithmetic on wires, shifts, rotary positions, norms with a shared gain: against the formulas, and the state law."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from seqblocks.analysis.check import load_text
from seqblocks.model.builder import build_model
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.ops.gate import GELU_MAX_ELEMENTS, activation_of_token
from seqblocks.testing import check_law
from tests.draws import draw


def from_text(text: str) -> SequenceModel:
    _, graph = load_text(text)
    assert graph
    return build_model(graph, device="cpu", dtype=torch.float64, seed=0)


def built(*steps: str, features: int = 6) -> SequenceModel:
    lines = "".join(f"    - {step}\n" for step in steps)
    text = f"seqblocks: 1\nmodel:\n  input: {{features: {features}}}\n  steps:\n{lines}"
    return from_text(text)


X = draw(2, 9, 6)
RESETS = torch.zeros(2, 9, dtype=torch.bool)
RESETS[0, [2, 3, 7]] = True
RESETS[1, [0, 8]] = True


def earlier(x: Tensor, by: int, resets: Tensor | None = None) -> Tensor:
    """Compute the definition, token by token."""
    y = torch.zeros_like(x)
    for row in range(x.shape[0]):
        start = 0
        for t in range(x.shape[1]):
            start = t if resets is not None and resets[row, t] else start
            if t - by >= start:
                y[row, t] = x[row, t - by]
    return y


def test_sums_products_and_factors() -> None:
    model = built("identity: {as: x}", "sigmoid: {as: s}", "add: {with: x, as: a}", "multiply: {by: s}", "scale: -0.5")
    s = X.sigmoid()
    torch.testing.assert_close(model(X), -0.5 * (s + X) * s, rtol=0, atol=1e-15)
    assert not list(model.parameters())


def test_quotients() -> None:
    y = built("sigmoid: {as: s}", "divide: {from: input, by: s}")(X)
    torch.testing.assert_close(y, X * (1 + (-X).exp()), rtol=1e-14, atol=1e-14)


def test_arithmetic_on_images_and_vectors() -> None:
    steps = "- identity: {as: a}\n    - scale: 2\n    - add: {with: a}\n    - multiply: {by: a}"
    text = f"seqblocks: 1\nmodel:\n  input: {{image: {{size: 4, channels: 3}}}}\n  steps:\n    {steps}\n"
    image = draw(2, 3, 4, 4)
    torch.testing.assert_close(from_text(text)(image), 3 * image**2)
    model = built("pool", "identity: {as: p}", "scale: 3", "add: {with: p}")
    torch.testing.assert_close(model(X), 4 * X.mean(1))


def test_identity_splits_a_wire() -> None:
    model = built("identity: {as: {a: 2, b: 4}}", "linear: {from: [b, a], features: 6, bias: false}")
    weight = model.get_parameter("linear.weight")
    torch.testing.assert_close(model(X), torch.cat([X[..., 2:], X[..., :2]], -1) @ weight.t())


@pytest.mark.parametrize("learned", [True, False])
def test_a_constant_is_the_same_for_every_token(learned: bool) -> None:
    model = built(f"constant: {{features: 3, value: 0.25, learned: {str(learned).lower()}}}")
    torch.testing.assert_close(model(X), torch.full((2, 9, 3), 0.25, dtype=torch.float64))
    assert [tuple(p.shape) for p in model.parameters()] == ([(3,)] if learned else [])
    if learned:
        model(X).sum().backward()
        gradient = model.get_parameter("constant.weight").grad
        assert gradient is not None
        assert gradient.tolist() == [18.0] * 3  # one for each token


@pytest.mark.parametrize("by", [1, 3, 20])
@pytest.mark.parametrize("resets", [None, RESETS])
def test_shift(by: int, resets: Tensor | None) -> None:
    torch.testing.assert_close(built(f"shift: {by}")(X, resets=resets), earlier(X, by, resets), rtol=0, atol=0)


@pytest.mark.parametrize("resets", [None, RESETS])
def test_token_shift(resets: Tensor | None) -> None:
    model = built("token_shift: {as: a}", "sigmoid: {as: m}", "token_shift: {from: a, mix: m, name: mixed}")
    with torch.no_grad():
        model.get_parameter("a.weight").copy_(draw(6))
    a = X + draw(6) * (earlier(X, 1, resets) - X)
    torch.testing.assert_close(model(X, resets=resets), a + a.sigmoid() * (earlier(a, 1, resets) - a))


def test_rotary_turns_by_the_position_in_the_sequence() -> None:
    y = built("rotary: {heads: 1, base: 100}")(X, resets=RESETS)
    place = torch.tensor([[0, 1, 0, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0]])
    pairs = torch.complex(X[..., :3], X[..., 3:])
    angle = place[..., None] * 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], -1), rtol=1e-12, atol=1e-12)
    part = built("rotary: {heads: 1, base: 100, features: 2}")(X, resets=RESETS)
    first = torch.complex(X[..., :1], X[..., 1:2]) * torch.polar(torch.ones_like(angle[..., :1]), angle[..., :1])
    torch.testing.assert_close(part, torch.cat([first.real, first.imag, X[..., 2:]], -1), rtol=1e-12, atol=1e-12)


def test_rotary_of_a_part_of_each_head() -> None:
    part = built("rotary: {heads: 2, features: 2, base: 7}")(X, resets=RESETS)
    alone = built("identity: {as: {a: 2, b: 1, c: 2, d: 1}}", "rotary: {from: a, heads: 1, base: 7}")(X, resets=RESETS)
    torch.testing.assert_close(part[..., :2], alone)
    torch.testing.assert_close(part[..., [2, 5]], X[..., [2, 5]], rtol=0, atol=0)
    turned = built("identity: {as: {a: 3, c: 2, d: 1}}", "rotary: {from: c, heads: 1, base: 7}")(X, resets=RESETS)
    torch.testing.assert_close(part[..., 3:5], turned)


def test_sinusoids() -> None:
    """Interleaved as in the paper, in halves as in tensor2tensor: the last wavelength is that of the base."""
    place = torch.arange(9, dtype=torch.float64).unsqueeze(-1)
    y = built("sinusoids: {base: 100}")(X) - X
    for pair in range(3):
        angle = place / 100 ** (2 * pair / 6)
        torch.testing.assert_close(y[0, :, 2 * pair :][:, :2], torch.cat([angle.sin(), angle.cos()], -1))
    y = built("sinusoids: {layout: halves, base: 100}")(X) - X
    angle = place / torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(y[0], torch.cat([angle.sin(), angle.cos()], -1))


@pytest.mark.parametrize("shape", [(1, 6), (3, 5), (2, 1), (0, 4), (1, GELU_MAX_ELEMENTS), (2, GELU_MAX_ELEMENTS)])
def test_gelu_of_a_token(shape: tuple[int, int]) -> None:
    """Of few and many numbers, contiguous or not: the values of torch, in new memory."""
    wide = draw(shape[0], 2 * shape[1]).float()
    parts = (wide[:, : shape[1]].contiguous(), wide[:, shape[1] :], wide[:, ::2], wide[:, ::2].double())
    for x in parts:
        before, y = x.clone(), activation_of_token("gelu")(x)
        rounding = 4 * torch.finfo(x.dtype).eps * max(map(abs, [0.0, *x.flatten().tolist()]))  # that of x * (1 + erf)
        torch.testing.assert_close(y, gelu(x), rtol=0, atol=rounding)
        y.mul_(2)
        assert torch.equal(x, before)


def test_elu_and_leaky_relu() -> None:
    torch.testing.assert_close(built("elu")(X), torch.where(X > 0, X, X.exp() - 1))
    torch.testing.assert_close(built("leaky_relu: {slope: 0.2}")(X), torch.where(X > 0, X, 0.2 * X))
    y = built("gate: {by: input, activation: leaky_relu}")(X)
    torch.testing.assert_close(y, torch.where(X > 0, X * X, 0.01 * X * X))


def test_an_average_of_values_with_exponential_weights() -> None:
    """The memory of RWKV-4: the weights e^k decay with the distance."""
    text = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - constant: {features: 6, learned: false, value: -0.3, as: decay}
    - scale: {from: input, by: 0.5, as: k}
    - exp: {as: weight}
    - gated_recurrence: {decay: decay, as: sum}
    - gate: {from: input, by: k, activation: exp}
    - gated_recurrence: {decay: decay, name: values}
    - divide: {by: sum}
"""
    model = from_text(text)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).clamp(min=0)
    weights = torch.exp(X / 2)[:, None] * torch.exp(-0.3 * distance).tril()[..., None]  # [batch, t, s, features]
    torch.testing.assert_close(model(X), (weights * X[:, None]).sum(2) / weights.sum(2))
    check_law(model)


@pytest.mark.parametrize(
    "steps",
    [
        ["sinusoids"], ["sinusoids: {layout: halves, base: 100}"], ["rotary: {heads: 1, features: 4}"],
        ["shift: 4"], ["token_shift"], ["rotary: {heads: 3}"],
        ["shift: 1", "rotary: {heads: 1}", "token_shift: {mix: input}"],
    ],
)
def test_state_law(steps: list[str]) -> None:
    model = built(*steps)
    check_law(model, seq=12, resets=[(0, 3), (0, 4), (1, 11)])
    state = model.init_state(2)
    poisoned = torch.full_like(X[:, 0], torch.nan)
    _, state = model.step(poisoned, state)
    y, _ = model.step(X[:, 0], state, resets=torch.tensor([True, True]))
    assert y.isfinite().all()


def test_a_state_of_no_tokens_is_passed_on() -> None:
    model = built("shift: 3")
    y, state = model(X[:, :2], return_state=True)
    none, same = model(X[:, :0], state=state, return_state=True)
    assert none.shape == (2, 0, 6)
    torch.testing.assert_close(model(X[:, 2:], state=same), earlier(X, 3)[:, 2:])
    torch.testing.assert_close(y, earlier(X[:, :2], 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gain", ["plain", "one_plus", "none"])
def test_head_norm_with_one_gain_for_all_heads(gain: str, bias: bool) -> None:
    model = built(f"head_norm: {{heads: 3, gain: {gain}, bias: {str(bias).lower()}, shared: true}}")
    own = dict(model.named_parameters())
    with torch.no_grad():
        for number, parameter in enumerate(own.values()):
            parameter.copy_(draw(2, seed=number))
    weight = own.get("head_norm.weight")
    factor = weight + 1 if weight is not None and gain == "one_plus" else weight
    expected = layer_norm(X.reshape(2, 9, 3, 2), (2,), factor, own.get("head_norm.bias")).flatten(-2)
    torch.testing.assert_close(model(X), expected)


def test_a_shared_gain_is_fused_with_skip_and_gate() -> None:
    steps = ("identity: {as: x}", "head_norm: {heads: 3, shared: true, bias: true}", "learnable_skip: {with: x}",
             "gate: {by: x}")  # fmt: skip
    model = built(*steps)
    hooked = built(*steps)
    hooked.get_submodule("head_norm").register_forward_hook(lambda *_: None)
    hooked.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(X), hooked(X))


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "none"])
@pytest.mark.parametrize("gate", ["before", "after"])
def test_rms_norm_with_any_gate_and_a_shared_gain(gate: str, activation: str) -> None:
    arguments = f"z: z, groups: 3, shared: true, gate: {gate}, activation: {activation}"
    model = built("identity: {as: z}", f"rms_norm: {{{arguments}}}")
    with torch.no_grad():
        model.get_parameter("rms_norm.weight").copy_(draw(2))
    opening = {"sigmoid": X.sigmoid(), "silu": X * X.sigmoid(), "none": X}[activation]
    x = (X * opening if gate == "before" else X).reshape(2, 9, 3, 2)
    normed = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * draw(2)).flatten(-2)
    torch.testing.assert_close(model(X), normed * opening if gate == "after" else normed)


def test_l2_norm() -> None:
    y = built("l2_norm: {heads: 3}")(X).reshape(2, 9, 3, 2)
    x = X.reshape(2, 9, 3, 2)
    torch.testing.assert_close(y, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.parametrize(
    "step",
    ["shift: 2", "token_shift", "rotary: {heads: 1}", "l2_norm: {heads: 2}", "head_norm: {heads: 2, shared: true}"],
)
def test_gradients_in_float64(step: str) -> None:
    model = built(step)
    assert torch.autograd.gradcheck(lambda x: model(x, resets=RESETS[:, :4]), draw(2, 4, 6).requires_grad_())


def test_drop_path_zeroes_whole_samples() -> None:
    model = built("{drop_path: 0.25}").train()
    x = draw(4000, 2, 6).abs() + 1
    torch.manual_seed(3)
    y = model(x)
    kept = y.flatten(1).any(1)
    assert torch.equal(y, torch.where(kept[:, None, None], x / 0.75, 0.0))
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)  # 4 standard deviations
    assert torch.equal(model.eval()(x), x)


def test_drop_path_drops_one_branch_of_parallel_as_residual_drops_its_own() -> None:
    branches = "{parallel: [{a: [{linear: 6}, {drop_path: 0.5}]}, {b: [identity]}]}"
    model, other = built(branches).train(), built("{residual: {drop_path: 0.5, steps: [{linear: 6}]}}").train()
    x = draw(8, 3, 6)
    other.load_state_dict({name.replace("parallel.a", "residual"): t for name, t in model.state_dict().items()})
    outputs = []
    for each in (model, other):
        torch.manual_seed(5)
        outputs.append(each(x))
    torch.testing.assert_close(outputs[0], outputs[1])
    dropped = (outputs[0] == x).flatten(1).all(1)
    assert 0 < dropped.sum() < 8
    check_law(model.eval(), seq=5)


def test_heads_repeated_and_joined() -> None:
    model = built("repeat_heads: {heads: 3, times: 2, as: r}", "linear: {from: input, features: 9, as: more}",
                  "join_heads: {from: r, with: more, heads: 3}")
    twice = X.unflatten(-1, (3, 2)).repeat_interleave(2, -2).flatten(-2).unflatten(-1, (3, 4))
    more = (X @ model.more.weight.T + model.more.bias).unflatten(-1, (3, 3))
    torch.testing.assert_close(model(X), torch.cat([twice, more], -1).flatten(-2), rtol=1e-14, atol=1e-14)
    check_law(model, seq=9, resets=[(0, 3), (1, 8)])


def test_features_of_each_head() -> None:
    """Fractions, sums, rolled positions, and a matrix shared by all heads, against the formula."""
    x = X.unflatten(-1, (3, 2))
    for step, expected in {
        "softmax: {heads: 3}": x.exp() / x.exp().sum(-1, keepdim=True),
        "sum_norm: {heads: 3, eps: 0.5}": x / (x.sum(-1, keepdim=True) + 0.5),
        "roll_heads: {heads: 3, by: 1}": x[..., [1, 0]],
        "elu_plus_one": torch.where(x > 0, x + 1, x.exp()),
    }.items():
        torch.testing.assert_close(built(step)(X), expected.flatten(-2), rtol=1e-13, atol=1e-14)
    for more, width in (("bias: true", 2), ("features: 9", 3)):
        model = built(f"headwise_linear: {{block: 2, shared: true, {more}, name: it}}")
        y = x @ model.it.weight.T + (model.it.bias if "bias" in more else 0)
        assert model.it.weight.shape == (width, 2)
        torch.testing.assert_close(model(X), y.flatten(-2), rtol=1e-13, atol=1e-14)
        check_law(model, seq=4)


CORRECTED = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 6, as: q}
    - linear: {from: input, features: 18, name: keys}
    - l2_norm: {heads: 6, as: k}
    - linear: {from: input, features: 24, as: v}
    - linear: {from: input, features: 4, name: gates}
    - log_decay: {kind: logsigmoid, temperature: 1, as: g}
    - linear: {from: input, features: 12, name: shares}
    - sigmoid: {as: b}
    - scan:
        order: ORDER
        merge: concat
        steps:
          - linear_attention:
              {q: q, k: k, v: v, decay: g, beta: b, heads: 2, value_heads: 4, rule: delta, writes: 3}
"""


def test_several_corrections_per_token() -> None:
    """Each token decays once, is corrected three times, and then reads; in reverse order too."""
    model = from_text(CORRECTED.replace("ORDER", "forward"))
    check_law(model, seq=11, cuts=[3, 7], resets=[(0, 4), (1, 9)])

    def mapped(name: str, *shape: int) -> Tensor:
        step = model.get_submodule(name)
        return (X @ step.weight.T + step.bias).unflatten(-1, shape)

    q, k, v = mapped("q", 2, 3), mapped("keys", 3, 2, 3), mapped("v", 3, 4, 2)
    k, b = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), mapped("shares", 3, 4).sigmoid()
    decay, memory, rows = mapped("gates", 4).sigmoid(), torch.zeros(2, 4, 3, 2, dtype=torch.float64), []
    for t in range(X.shape[1]):
        memory = memory * decay[:, t, :, None, None]
        for n in range(3):
            key = k[:, t, n].repeat_interleave(2, 1)
            missing = v[:, t, n] - torch.einsum("bhk,bhkv->bhv", key, memory)
            memory = memory + torch.einsum("bh,bhk,bhv->bhkv", b[:, t, n], key, missing)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t].repeat_interleave(2, 1) * 3**-0.5, memory).flatten(1))
    torch.testing.assert_close(model(X), torch.stack(rows, 1), rtol=1e-12, atol=1e-13)
    both = from_text(CORRECTED.replace("ORDER", "[forward, reverse]"))
    both.load_state_dict(model.state_dict())
    torch.testing.assert_close(both(X)[..., 8:], model(X.flip(1)).flip(1), rtol=1e-12, atol=1e-13)
