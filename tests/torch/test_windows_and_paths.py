"""MambaVision and a dual-path separator, from tests/spec/published, against loops over their windows and chunks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv_transpose1d, gelu, layer_norm, linear, pad, softplus
from torch.nn.functional import scaled_dot_product_attention as attend

from tests.draws import draw
from tests.torch.test_published import STREAMS, WHOLE, small

Weights = dict[str, Tensor]


def drawn(name: str, changes: dict[str, Any]) -> Any:
    """Return a model whose parameters are drawn, so that biases and gains count."""
    model = small(name, changes)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * draw(*parameter.shape, seed=at))
    return model


def below(p: Weights, name: str) -> Weights:
    return {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}


def normed(p: Weights, x: Tensor, name: str = "layer_norm") -> Tensor:
    return layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def attention(p: Weights, x: Tensor, heads: int, causal: bool = False, base: float = 0) -> Tensor:
    q, k, v = linear(x, p["qkv.weight"], p["qkv.bias"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if base:
        half = q.shape[-1] // 2
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * base ** -(torch.arange(half, dtype=x.dtype) / half)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.complex(*y.split(half, -1)) * turn for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
    return attend(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def mixer(p: Weights, x: Tensor) -> Tensor:
    """Return MambaVision's mixer of a window [batch, tokens, features], by a loop over the tokens."""
    u, z = linear(x, p["in_proj.weight"]).chunk(2, -1)
    u, z = (
        torch.nn.functional.silu(conv1d(y.mT, p[f"conv1d_{name}.weight"], padding=1, groups=y.shape[-1]).mT)
        for name, y in (("x", u), ("z", z))
    )
    inner, rank = u.shape[-1], math.ceil(x.shape[-1] / 16)
    low, B, C = linear(u, p["x_proj.weight"]).split([rank, 8, 8], -1)
    dt = softplus(linear(low, p["dt_proj.weight"]) + 2 * p["dt_bias.weight"])
    h, out = x.new_zeros(len(x), inner, 8), []
    for t in range(x.shape[1]):
        h = torch.exp(-dt[:, t, :, None] * p["y.A_log"].exp()) * h
        h = h + (dt[:, t] * u[:, t])[:, :, None] * B[:, t, None]
        out.append((h * C[:, t, None]).sum(-1) + p["y.D"] * u[:, t])
    return linear(torch.cat([torch.stack(out, 1), z], -1), p["out_proj.weight"])


def stage(p: Weights, image: Tensor, heads: int, side: int) -> Tensor:
    """Return the blocks of a stage, window by window, for an image [batch, rows, columns, features]."""
    _, rows, columns, _ = image.shape
    image = pad(image, (0, 0, 0, -columns % side, 0, -rows % side))
    out = torch.zeros_like(image)
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            place = (slice(None), slice(top, top + side), slice(left, left + side))
            x = image[place].flatten(1, 2)
            for layer in range(1 + max(int(name.split(".")[2]) for name in p)):
                own = below(p, f"each.blocks.{layer}")
                mix, mlp = below(own, "mix"), below(own, "mlp")
                h = normed(mix, x)
                if "mixer.in_proj.weight" in mix:
                    x = x + mixer(below(mix, "mixer"), h)
                else:
                    y = attention(below(mix, "attend"), h, heads)
                    x = x + linear(y, mix["attend.proj.weight"], mix["attend.proj.bias"])
                h = gelu(linear(normed(mlp, x), mlp["linear.weight"], mlp["linear.bias"]))
                x = x + linear(h, mlp["out.weight"], mlp["out.bias"])
            out[place] = x.unflatten(1, (side, side))
    return out[:, :rows, :columns]


def test_stages_of_mambavision() -> None:
    """Windows of 3 x 3 on 4 x 4 tokens are padded, those of 2 x 2 on 2 x 2 tokens are not. Both sum in float64."""
    model = drawn("mambavision_t", WHOLE["mambavision_t"])
    p, seen = dict(model.named_parameters()), {}
    for name in ("level3", "level4"):
        model._modules[name].register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
    model(draw(2, 3, 64, 64))
    for name, size, heads, side in (("level3", 4, 2, 3), ("level4", 2, 4, 2)):
        x, y = seen[name]
        expected = stage(below(p, name), x.unflatten(1, (size, size)), heads, side).flatten(1, 2)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_a_dual_path_separator() -> None:
    """4 chunks of 3 frames of 8 samples: within a chunk in both directions, across chunks from the past."""
    model = drawn("dual_path", STREAMS["dual_path"])
    p, x = dict(model.named_parameters()), draw(2, 96, 1)

    def layers(own: Weights, y: Tensor, causal: bool) -> Tensor:
        mix, network = below(own, "mix"), below(own, "network")
        h = attention(mix, normed(mix, y), 2, causal, 10_000)
        y = y + linear(h, mix["out.weight"], mix["out.bias"])
        h = linear(normed(network, y), network["linear.weight"], network["linear.bias"]).relu()
        return y + linear(h, network["down.weight"], network["down.bias"])

    encoded = conv1d(pad(x.mT, (8, 0)), p["encoder.weight"], stride=8).mT.relu()
    y = linear(normed(p, encoded), p["linear.weight"], p["linear.bias"])
    own = below(p, "paths.0")
    for name, causal in (("within", False), ("across", True)):
        path, parts = below(own, name), torch.zeros_like(y)
        for at in range(4 if name == "within" else 3):
            place = slice(3 * at, 3 * at + 3) if name == "within" else slice(at, None, 3)
            parts[:, place] = layers(below(path, "each.repeat.0.layer"), y[:, place], causal)
        y = y + normed(path, parts)
    masks = linear(y, p["masks.weight"], p["masks.bias"]).relu()
    voices = [
        conv_transpose1d((encoded * mask).mT, p["decoder.conv_transpose1d.weight"], stride=8)[..., :96].mT
        for mask in masks.chunk(2, -1)
    ]
    torch.testing.assert_close(model(x), torch.cat(voices, -1), rtol=1e-10, atol=1e-10)
