"""TTT-Linear (arXiv:2407.04620) as a bundled model of cells, against a loop in float64 with gradients of autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, silu

import seqblocks
from seqblocks.checkpoint import load_official
from seqblocks.testing import check_law

HEADS, HEAD, BATCH, EPS = 2, 6, 4, 1e-6
SMALL: dict[str, Any] = {
    "let.dim": HEADS * HEAD, "let.heads": HEADS, "let.layers_wanted": 2, "let.hidden": 10, "let.vocabulary": 19,
    "let.batch": BATCH, "expect.params": 2 * (HEADS * HEAD * (4 * 12 + 2 + 6 + 7 + 30) + 6) + 19 * 12 + 12,
}  # fmt: skip


@pytest.fixture(name="model", scope="module")
def small() -> Any:
    model = seqblocks.build("ttt_small", set=SMALL, dtype="float64").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.4 * drawn)
    return model


def rotated(x: Tensor, place: int) -> Tensor:
    """Rotate pairs of neighbouring features as complex numbers."""
    angles = place * 10_000.0 ** (-torch.arange(HEAD // 2, dtype=torch.float64) * 2 / HEAD)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def mixed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of a mixer, token by token. The gradient of the inner loss is that of autograd."""

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (HEADS, HEAD))

    q, k, v = (heads(x @ p[f"{name}_proj.weight"].T) for name in "qkv")
    rate = (x @ p["learning_rate.weight"].T + p["learning_rate.bias"]).sigmoid() / HEAD
    gain, shift = heads(p["ttt_norm_weight.weight"]), heads(p["ttt_norm_bias.weight"])
    factor = (1 / torch.arange(1, BATCH + 1, dtype=torch.float64) + p["token_idx.weight"]).clamp(min=0)

    def inner(W: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return gain * layer_norm(torch.einsum("bhij,bhj->bhi", W, x) + b, (HEAD,), eps=EPS) + shift

    W = p["maps.start_W"].view(HEADS, HEAD, HEAD).expand(len(x), -1, -1, -1)
    b = heads(p["maps.start_b"]).expand(len(x), -1, -1)
    dW, db, out = torch.zeros_like(W), torch.zeros_like(b), []
    for t in range(x.shape[1]):
        place = t % BATCH
        if place == 0:
            W, b, dW, db = W - factor[-1] * dW, b - factor[-1] * db, torch.zeros_like(W), torch.zeros_like(b)
        key, query = rotated(k[:, t], place), rotated(q[:, t], place)
        loss = (inner(W, b, key) - (v[:, t] - key)).square().sum() / 2
        by_W, by_b = torch.autograd.grad(loss, (W, b), create_graph=True)
        dW, db = dW + rate[:, t, :, None, None] * by_W, db + rate[:, t, :, None] * by_b
        out.append((query + inner(W - factor[place] * dW, b - factor[place] * db, query)).flatten(1))
    y = layer_norm(torch.stack(out, 1), (HEADS * HEAD,), p["post_norm.weight"], p["post_norm.bias"], EPS)
    return y @ p["o_proj.weight"].T


def logits(p: dict[str, Tensor], ids: Tensor) -> Tensor:
    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (HEADS * HEAD,), p[name], EPS)

    x = p["embed.weight"][ids]
    for layer in range(2):
        start = f"layers.{layer}.ttt_layer"
        own = {name.removeprefix(f"{start}.token.ttt_mixer."): value for name, value in p.items() if start in name}
        x = x + mixed(own, normed(x, f"{start}.token.norm.weight"))
        gate, up, down = (p[f"{start}.channel.swiglu.{name}_weight"] for name in ("gate", "up", "down"))
        h = normed(x, f"{start}.channel.norm.weight")
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
    return normed(x, "norm.weight") @ p["embed.weight"].T


def test_values_and_gradients(model: Any) -> None:
    """10 tokens: two mini-batches and a half. Both compute the same sums in float64, so 1e-9 leaves decades of room."""
    ids = torch.randint(19, (2, 10), generator=torch.Generator().manual_seed(1))
    y, expected = model(ids), logits(dict(model.named_parameters()), ids)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = list(model.parameters())
    found = torch.autograd.grad((y * weights).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
def test_the_law(model: Any) -> None:
    check_law(model, seq=11, cuts=(3, 8), resets=((0, 5),))


def test_weights_of_the_released_code_give_its_logits() -> None:
    """11 tokens: two mini-batches and a rest, which the release computes in its dual form (see the README there)."""
    with np.load(Path(__file__).parent.parent / "golden" / "hub" / "ttt_linear.npz") as file:
        data = dict(file)
    model = seqblocks.build("ttt_small", set=SMALL, dtype="float64").eval()
    load_official(model, {key[2:]: torch.from_numpy(data[key]) for key in data if key.startswith("w/")})
    ids, expected = (torch.from_numpy(data[key]) for key in ("in/input_ids", "out/logits"))
    torch.testing.assert_close(model(ids), expected, rtol=1e-9, atol=1e-10)


def test_the_count_is_that_of_the_release() -> None:
    """The released class has 110,276,688 parameters for "125m" on the meta device; its output shares the embedding."""
    model = seqblocks.build("ttt_small", device="meta")
    assert sum(p.numel() for p in model.parameters()) == 110_276_688
