"""Published recurrences written as cells, against loops in float64: LinOSS, Liquid-S4, Titans, MesaNet, TTT-Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.graph import walk
from seqblocks.runtime.cell import Cell
from seqblocks.testing import check_law

# LinOSS-IM (arXiv:2410.03943, eq. 3): x'' = -A x + B u, by an implicit step of size dt. A 6, dt 6, states 6.
LINOSS = """
- constant: {from: input, features: 6, as: raw, name: stiffness, init: {weight: "uniform(0.1, 1)"}}
- constant: {from: input, features: 6, as: log_dt, name: step_size, init: {weight: "normal(0, 1)"}}
- calc: {A: "max(raw, 0)", dt: "sigmoid(log_dt)", S: "1 / (1 + dt * dt * A)"}
- linear: {from: input, features: 12, bias: false, as: [real, imaginary], name: B}
- cell:
    from: input
    state: {zr: 6, yr: 6, zi: 6, yi: 6}
    steps:
      - calc:
          zr: "S * zr - dt * A * S * yr + dt * S * real"
          yr: "yr + dt * zr"
          zi: "S * zi - dt * A * S * yi + dt * S * imaginary"
          yi: "yi + dt * zi"
      - concat: {from: [yr, yi]}
- linear: {features: 4, bias: false, name: C}
"""

# Liquid-S4 (arXiv:2209.12951, eq. 4): x[k] = (A + B u[k]) x[k - 1] + B u[k] with diagonal, complex A and B: 4 channels
# of 3 states, y = Re(C x). A = -a + i w.
LIQUID = """
- constant: {features: 12, as: a, name: decay, init: {weight: "uniform(0.1, 0.9)"}}
- constant: {features: 12, as: w, name: frequency, init: {weight: "normal(0, 0.5)"}}
- constant: {features: 12, as: br, name: b_real, init: {weight: "normal(0, 0.4)"}}
- constant: {features: 12, as: bi, name: b_imaginary, init: {weight: "normal(0, 0.4)"}}
- repeat_heads: {from: input, heads: 4, times: 3, as: u}
- cell:
    from: u
    state: {re: 12, im: 12}
    steps:
      - calc: {ar: "a * cos(w) + br * u", ai: "a * sin(w) + bi * u"}
      - calc: {before: "re", re: "ar * re - ai * im + br * u", im: "ar * im + ai * before + bi * u"}
      - concat: {from: [re, im]}
- linear: {features: 4, bias: false, name: C}
"""

# Titans (arXiv:2501.00663, eq. 8 to 14) with a linear memory, 2 heads of 3: momentum eta, rate theta, forgetting alpha.
TITANS = """
- linear: {features: 18, bias: false, as: [q, k, v], name: qkv}
- linear: {from: input, features: 6, as: [eta, theta, alpha], name: gates}
- l2_norm: {from: k, heads: 2, as: key}
- sigmoid: {from: eta, as: e1}
- repeat_heads: {heads: 2, times: 9, as: keep}
- sigmoid: {from: theta, as: e2}
- repeat_heads: {heads: 2, times: 3, as: rate}
- sigmoid: {from: alpha, as: e3}
- repeat_heads: {heads: 2, times: 9, as: forget}
- cell:
    from: q
    state: {M: {features: 18, start: "normal(0, 0.3)", learned: true}, S: 18}
    steps:
      - matrix_product: {from: key, matrix: M, heads: 2, as: seen}
      - calc: {surprise: "-rate * (seen - v)"}
      - outer_product: {from: surprise, with: key, heads: 2, as: change}
      - calc: {S: "keep * S + change", M: "(1 - forget) * M + S"}
      - matrix_product: {from: q, matrix: M, heads: 2}
- linear: {features: 4, bias: false, name: out}
"""

# MesaNet (arXiv:2506.05233), 2 heads of 3: y = H (G + Lambda)^-1 q by 3 steps of conjugate gradients, which
# solve 3 equations exactly. Lambda = 1.
MESA = """
- linear: {features: 18, bias: false, as: [q, k, v], name: qkv}
- linear: {from: input, features: 4, as: [g, b], name: gates}
- sigmoid: {from: g, as: g1}
- repeat_heads: {heads: 2, times: 9, as: gamma}
- sigmoid: {from: b, as: b1}
- repeat_heads: {heads: 2, times: 3, as: beta}
- cell:
    from: q
    state: {G: 18, H: 18}
    steps:
      - calc: {bk: "beta * k"}
      - outer_product: {from: bk, with: k, heads: 2, as: kk}
      - outer_product: {from: v, with: bk, heads: 2, as: vk}
      - calc: {G: "gamma * G + kk", H: "gamma * H + vk", zero: "0 * q"}
      - concat: {from: [zero, q, q]}
      - repeat:
          times: 3
          steps:
            - identity: {as: {x: 6, r: 6, p: 6}}
            - matrix_product: {from: p, matrix: G, heads: 2, as: Gp}
            - calc: {Ap: "Gp + p", pAp: "p * Ap", rr: "r * r"}
            - reduce: {from: pAp, pattern: "seq (heads d) -> seq heads", heads: 2, by: sum, as: curvature}
            - reduce: {from: rr, pattern: "seq (heads d) -> seq heads", heads: 2, by: sum, as: size}
            - calc: {ratio: "size / (curvature + 1e-30)"}
            - repeat_heads: {from: ratio, heads: 2, times: 3, as: length}
            - calc: {x2: "x + length * p", r2: "r - length * Ap", rr2: "r2 * r2"}
            - reduce: {from: rr2, pattern: "seq (heads d) -> seq heads", heads: 2, by: sum, as: smaller}
            - calc: {ratio2: "smaller / (size + 1e-30)"}
            - repeat_heads: {from: ratio2, heads: 2, times: 3, as: turn}
            - calc: {p2: "r2 + turn * p"}
            - concat: {from: [x2, r2, p2]}
      - identity: {as: {solution: 6, rest: 12}}
      - matrix_product: {from: solution, matrix: H, heads: 2}
- linear: {features: 4, bias: false, name: out}
"""

# TTT-Linear (arXiv:2407.04620, sec. 2.7), 2 heads of 3: the weights W and b of f(x) = x + norm(W x + b) are updated by
# gradients of |f(k) - v|^2 / 2 at the weights of the beginning of each mini-batch of 4 tokens.
TTT = """
- linear: {features: 18, bias: false, as: [q, k, v], name: qkv}
- linear: {from: input, features: 2, as: lr, name: rate}
- sigmoid: {from: lr, as: eta}
- repeat_heads: {heads: 2, times: 3, as: rate}
- constant: {from: q, features: 6, as: gain, name: gain, value: 1, init: {weight: "uniform(0.5, 1.5)"}}
- constant: {from: q, features: 6, as: shift, name: shift, init: {weight: "normal(0, 0.3)"}}
- cell:
    from: q
    state:
      W: {features: 18, start: "normal(0, 0.5)", learned: true}
      b: {features: 6, start: "normal(0, 0.5)", learned: true}
      dW: 18
      db: 6
      place: 1
    steps:
      - calc: {first: "max(1 - place, 0)"}
      - calc: {W: "W - first * dW", b: "b - first * db"}
      - matrix_product: {from: k, matrix: W, heads: 2, as: Wk}
      - calc: {z: "Wk + b"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: m}
      - repeat_heads: {heads: 2, times: 3, as: mean}
      - calc: {centred: "z - mean", square: "centred * centred"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: s}
      - repeat_heads: {heads: 2, times: 3, as: variance}
      - calc: {scale: "1 / sqrt(variance + 1e-6)", n: "centred * scale", y: "gain * n + shift", g: "(k + y - v) * gain"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: g1}
      - repeat_heads: {heads: 2, times: 3, as: gm}
      - calc: {gn: "g * n"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: g2}
      - repeat_heads: {heads: 2, times: 3, as: gnm}
      - calc: {e: "rate * scale * (g - gm - n * gnm)"}
      - outer_product: {from: e, with: k, heads: 2, as: change}
      - calc: {dW: "(1 - first) * dW + change", db: "(1 - first) * db + e", place: "place + 1 - 4 * max(place - 2, 0)"}
      - calc: {W_now: "W - dW", b_now: "b - db"}
      - matrix_product: {from: q, matrix: W_now, heads: 2, as: Wq}
      - calc: {zq: "Wq + b_now"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: mq}
      - repeat_heads: {heads: 2, times: 3, as: mean_q}
      - calc: {cq: "zq - mean_q", square_q: "cq * cq"}
      - reduce: {pattern: "seq (heads d) -> seq heads", heads: 2, by: mean, as: sq}
      - repeat_heads: {heads: 2, times: 3, as: variance_q}
      - calc: {out: "q + gain * cq / sqrt(variance_q + 1e-6) + shift"}
- linear: {features: 4, bias: false, name: out}
"""

Weights = dict[str, Tensor]


def rows(x: Tensor, heads: int = 2) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def linoss(p: Weights, x: Tensor) -> Tensor:
    A, dt = p["stiffness.weight"].relu(), p["step_size.weight"].sigmoid()
    B, C = (p[f"{name}.weight"] for name in "BC")
    S = 1 / (1 + dt**2 * A)
    drive = torch.complex(*(x @ B.T).chunk(2, -1))
    z = y = torch.zeros(len(x), 6, dtype=torch.complex128)
    out = []
    for t in range(x.shape[1]):
        # the inverse of [[1, dt A], [-dt, 1]], which is S [[1, -dt A], [dt, 1]], times (z + dt B u, y)
        f = z + dt * drive[:, t]
        z, y = S * (f - dt * A * y), S * (dt * f + y)
        out.append(torch.cat([y.real, y.imag], -1) @ C.T)
    return torch.stack(out, 1)


def liquid(p: Weights, x: Tensor) -> Tensor:
    a = torch.polar(p["decay.weight"], p["frequency.weight"])
    b = torch.complex(p["b_real.weight"], p["b_imaginary.weight"])
    state, out = torch.zeros(len(x), 12, dtype=torch.complex128), []
    for t in range(x.shape[1]):
        u = x[:, t].repeat_interleave(3, -1)
        state = (a + b * u) * state + b * u
        out.append(torch.cat([state.real, state.imag], -1) @ p["C.weight"].T)
    return torch.stack(out, 1)


def projected(p: Weights, x: Tensor) -> list[Tensor]:
    return [rows(part) for part in (x @ p["qkv.weight"].T).chunk(3, -1)]


def titans(p: Weights, x: Tensor) -> Tensor:
    q, k, v = projected(p, x)
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()  # the `eps` of l2_norm
    eta, theta, alpha = (x @ p["gates.weight"].T + p["gates.bias"]).sigmoid().chunk(3, -1)
    M = p["cell.start_M"].view(2, 3, 3).expand(len(x), -1, -1, -1)
    S, out = torch.zeros_like(M), []
    for t in range(x.shape[1]):
        error = torch.einsum("bhij,bhj->bhi", M, k[:, t]) - v[:, t]
        gradient = torch.einsum("bhi,bhj->bhij", error, k[:, t])
        S = eta[:, t, :, None, None] * S - theta[:, t, :, None, None] * gradient
        M = (1 - alpha[:, t, :, None, None]) * M + S
        out.append(torch.einsum("bhij,bhj->bhi", M, q[:, t]).flatten(1) @ p["out.weight"].T)
    return torch.stack(out, 1)


def mesa(p: Weights, x: Tensor) -> Tensor:
    q, k, v = projected(p, x)
    gamma, beta = ((x @ p["gates.weight"].T + p["gates.bias"]).sigmoid()[..., None, None]).chunk(2, 2)
    G = H = torch.zeros(len(x), 2, 3, 3, dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        G = gamma[:, t] * G + beta[:, t] * torch.einsum("bhi,bhj->bhij", k[:, t], k[:, t])
        H = gamma[:, t] * H + beta[:, t] * torch.einsum("bhi,bhj->bhij", v[:, t], k[:, t])
        solved = torch.linalg.solve(G + torch.eye(3, dtype=x.dtype), q[:, t])
        out.append(torch.einsum("bhij,bhj->bhi", H, solved).flatten(1) @ p["out.weight"].T)
    return torch.stack(out, 1)


def ttt(p: Weights, x: Tensor) -> Tensor:
    """The gradient of the inner loss is autograd's."""
    q, k, v = projected(p, x)
    eta = (x @ p["rate.weight"].T + p["rate.bias"]).sigmoid()
    gain, shift = rows(p["gain.weight"]), rows(p["shift.weight"])

    def inner(W: Tensor, b: Tensor, x: Tensor) -> Tensor:
        z = torch.einsum("bhij,bhj->bhi", W, x) + b
        return x + gain * torch.nn.functional.layer_norm(z, (3,), eps=1e-6) + shift

    W = p["cell.start_W"].view(2, 3, 3).expand(len(x), -1, -1, -1)
    b = p["cell.start_b"].view(2, 3).expand(len(x), -1, -1)
    dW, db, out = torch.zeros_like(W), torch.zeros_like(b), []
    for t in range(x.shape[1]):
        if t % 4 == 0:
            W, b, dW, db = W - dW, b - db, torch.zeros_like(W), torch.zeros_like(b)
        loss = (inner(W, b, k[:, t]) - v[:, t]).square().sum() / 2
        gradient = torch.autograd.grad(loss, (W, b), create_graph=True)
        dW, db = dW + eta[:, t, :, None, None] * gradient[0], db + eta[:, t, :, None] * gradient[1]
        out.append(inner(W - dW, b - db, q[:, t]).flatten(1) @ p["out.weight"].T)
    return torch.stack(out, 1)


MODELS: dict[str, tuple[str, Callable[[Weights, Tensor], Tensor], Any]] = {  # steps, loop, groups of states
    "linoss": (LINOSS, linoss, (("yi", "zi"), ("yr", "zr"))),
    "liquid": (LIQUID, liquid, (("im", "re"),)),
    "titans": (TITANS, titans, None),
    "mesa": (MESA, mesa, (("G",), ("H",))),
    "ttt": (TTT, ttt, None),
}


def text_of(steps: str) -> str:
    lines = "\n".join(f"    {line}" for line in steps.splitlines())
    return f"seqblocks: 1\nmodel:\n  input: {{features: 4}}\n  steps:\n{lines}\n"


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str) -> None:
    """22 tokens: not a multiple of TTT's mini-batch. Sums of 22 products in float64 differ by far less than 1e-9."""
    steps, independent, groups = MODELS[name]
    model = seqblocks.build_text(text_of(steps), dtype=torch.float64)
    (cell,) = (each for each in model.modules() if isinstance(each, Cell))
    assert (cell._parts.groups and tuple(sorted(cell._parts.groups))) == groups
    x = torch.randn(2, 22, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y, expected = model(x), independent(dict(model.named_parameters()), x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    leaves, weights = [x, *model.parameters()], torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_law(name: str) -> None:
    check_law(seqblocks.build_text(text_of(MODELS[name][0]), dtype=torch.float64), seq=11)


def test_the_steps_of_mesanet_are_on_all_tokens() -> None:
    """The states are linear, so the conjugate gradients are computed for all tokens at once."""
    _, spec = seqblocks.load_text(text_of(MESA))
    model = seqblocks.build_model(spec)
    (cell,) = (each for each in model.modules() if isinstance(each, Cell))
    assert "repeat" in [node.name for node in cell._parts.from_states]
    assert sum(node.verb == "matrix_product" for node in walk(spec.graph)) == 4
