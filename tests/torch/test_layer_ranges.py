"""Wires of several layers, `layers[:].v`: depth-weighted averages and hyper-connections against plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

import seqblocks
from seqblocks.testing import check_law

DENSE = """
seqblocks: 1
let: {dim: 6, depth: 4}
model:
  input: {features: dim}
  steps:
    - identity: {as: embedded}
    - repeat:
        name: layers
        times: depth
        steps:
          - residual: [causal_conv, {linear: dim}]
          - identity: {as: made}
          - concat: {from: [embedded, "layers[:].made", made], as: all}
          - aside: [{constant: {features: layer + 2, as: weights, init: {weight: "normal(0, 1)"}}}]
          - matrix_product: {from: weights, matrix: all, transposed: true}
"""


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_layer_reads_all_layers_above() -> None:
    """DenseFormer (arXiv:2402.02622): after each layer, a weighted sum of its output and of all before it, and of the
    embedding. Sums of a few numbers have errors of 1e-15."""
    model, x = seqblocks.build_text(DENSE, dtype=torch.float64, seed=0), given(2, 9, 6)
    check_law(model)
    p = dict(model.named_parameters())
    found, y = [x], x
    for layer in range(4):
        w, b = p[f"layers.{layer}.residual.causal_conv.weight"], p[f"layers.{layer}.residual.causal_conv.bias"]
        padded = torch.cat([x.new_zeros(2, w.shape[-1] - 1, 6), y], 1).transpose(1, 2)
        z = torch.nn.functional.conv1d(padded, w.view(6, 1, -1), b, groups=6).transpose(1, 2)
        z = z @ p[f"layers.{layer}.residual.linear.weight"].T + p[f"layers.{layer}.residual.linear.bias"]
        found.append(y + z)
        y = torch.einsum("i,ibtd->btd", p[f"layers.{layer}.weights.weight"].view(-1), torch.stack(found))
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)


def test_a_range_is_that_of_a_list() -> None:
    text = """
seqblocks: 1
model:
  input: {features: 2}
  steps:
    - repeat: {name: layers, times: 5, steps: [{scale: {by: 2, as: h}}]}
    - concat: {from: "layers[RANGE].h"}
"""
    x = given(1, 3, 2)
    ranges = {":": range(5), "1:": range(1, 5), "-2:": range(3, 5), "1:-1": range(1, 4), ":99": range(5)}
    for written, numbers in ranges.items():
        y = seqblocks.build_text(text.replace("RANGE", written), dtype=torch.float64)(x)
        torch.testing.assert_close(y, torch.cat([2 ** (n + 1) * x for n in numbers], -1), rtol=0, atol=0)


HYPER = """
seqblocks: 1
let: {dim: 6, depth: 3, n: 3}
blocks:
  hyper:
    about: a layer of hyper-connections (arXiv:2409.19606) -- n streams of dim features, of which a branch reads a mix
    args: {n: int, dim: int, branch: steps}
    steps:
      - identity: {as: streams}
      - each: {axis: features, size: dim, steps: [layer_norm, {linear: {features: n + 2, bias: false}}, tanh]}
      - rearrange: {pattern: "seq (n k) -> seq (k n)", n: n, as: {alpha: n + n * n, beta: n}, name: by_weight}
      - constant: {from: streams, features: n + n * n, init: {weight: "normal(0, 1)"}, as: fixed_alpha}
      - constant: {from: streams, features: n, init: {weight: ones}, as: fixed_beta}
      - calc: {weights: s * alpha + fixed_alpha, learned: {s: 0.01}}
      - identity: {as: {m: n, r: n * n}}
      - calc: {b: s * beta + fixed_beta, learned: {s: 0.01}}
      - matrix_product: {from: m, matrix: streams, transposed: true}
      - branch: {name: branch, as: made}
      - outer_product: {from: b, with: made, as: added}
      - repeat_heads: {from: streams, heads: 1, times: n, as: copies}
      - matrix_product: {from: r, matrix: copies, heads: n, transposed: true}
      - add: {with: added}
model:
  input: {features: dim}
  steps:
    - repeat_heads: {heads: 1, times: n}
    - repeat:
        name: layers
        times: depth
        steps:
          - hyper: {n: n, dim: dim, branch: [rms_norm, {causal_conv: {kernel: 2}}, {linear: dim}]}
    - rearrange: {pattern: "seq (n d) -> seq (d n)", n: n}
    - reduce: {pattern: "seq (d n) -> seq d", n: n, by: sum}
"""


def test_hyper_connections() -> None:
    """Dynamic hyper-connections in plain torch, from the equations of the paper."""

    model, x = seqblocks.build_text(HYPER, dtype=torch.float64, seed=0), given(2, 7, 6)
    check_law(model)
    p = dict(model.named_parameters())
    h = x.unsqueeze(2).expand(2, 7, 3, 6)  # [batch, seq, n, dim]
    for layer in range(3):
        own = {name.removeprefix(f"layers.{layer}.hyper."): each for name, each in p.items() if f".{layer}." in name}
        norm = torch.nn.functional.layer_norm(h, (6,), own["each.layer_norm.weight"], own["each.layer_norm.bias"], 1e-5)
        weights = torch.tanh(norm @ own["each.linear.weight"].T)  # [batch, seq, n, n + 2]
        m = own["weights.s"] * weights[..., 0] + own["fixed_alpha.weight"].view(-1)[:3]
        r = own["weights.s"] * weights[..., 1:4] + own["fixed_alpha.weight"].view(-1)[3:].view(3, 3).T
        b = own["b.s"] * weights[..., 4] + own["fixed_beta.weight"].view(-1)
        y = torch.einsum("bti,btid->btd", m, h)
        y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * own["branch.rms_norm.weight"]
        w, before = own["branch.causal_conv.weight"].view(6, 2), torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        y = w[:, 1] * y + w[:, 0] * before + own["branch.causal_conv.bias"]
        y = y @ own["branch.linear.weight"].T + own["branch.linear.bias"]
        h = b.unsqueeze(-1) * y.unsqueeze(2) + torch.einsum("btij,btid->btjd", r, h)
    torch.testing.assert_close(model(x), h.sum(2), rtol=1e-11, atol=1e-11)
