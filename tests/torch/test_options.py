"""Options of the official packages without golden cases, against the equations written out here, token by token.

float64, values and gradients of every parameter. Both sides compute the same sums of fewer than a thousand products of
order 1, in another order: 1e-10 of the largest value of an array. Where the official cell is a parallel form
(tests/torch/test_golden_vil.py), the reference here is the recurrence that we run, so the tolerance is as small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqblocks
from seqblocks.checkpoint import load_official, official_name
from seqblocks.model.sequence_model import SequenceModel
from tests.draws import draw

Weights = dict[str, Tensor]


def built(text: str, seed: int = 0) -> tuple[SequenceModel, Weights]:
    """Return a model with every parameter redrawn, and the parameters by their official names."""
    model = seqblocks.build_text(text, dtype=torch.float64).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            width = p.shape[-1] if p.dim() > 1 else 4
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / width**0.5)
    return model, {str(official_name(model.spec, name)): p for name, p in model.named_parameters()}


def spec(width: int, *steps: str, use: str = "xlstm") -> str:
    return f"seqblocks: 1\nuse: [{use}]\nmodel: {{input: {{features: {width}}}, steps: [{', '.join(steps)}]}}\n"


def same(model: SequenceModel, w: Weights, truth: Callable[[Weights, Tensor], Tensor], x: Tensor) -> None:
    """Compare model and reference: values, and gradients of every parameter and of x unless it is token ids."""
    leaves = [x.requires_grad_(), *w.values()] if x.is_floating_point() else [*w.values()]
    found, expected = model(x), truth(w, x)
    assert found.shape == expected.shape
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    pairs = zip(
        (found, *torch.autograd.grad((found * weights).sum(), leaves)),
        (expected, *torch.autograd.grad((expected * weights).sum(), leaves)),
        strict=True,
    )
    for at, (a, b) in enumerate(pairs):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max().item()), at


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def normed(x: Tensor, heads: int = 1, eps: float = 1e-5) -> Tensor:
    x = x.unflatten(-1, (heads, -1))
    return ((x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()).flatten(-2)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def convolved(w: Weights, name: str, x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Return the activation of the causal convolution; the last tap is at the current token."""
    kernel = w[f"{name}.weight"]
    taps = kernel.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = sum(padded[:, k : k + x.shape[1]] * kernel[:, 0, k] for k in range(taps))
    return activation(y + w[f"{name}.bias"] if f"{name}.bias" in w else y)  # type: ignore[arg-type]


# --- Vision Mamba -----------------------------------------------------------------------------------------------------


def scanned(u: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor) -> Tensor:
    h, ys = torch.zeros(*u[:, 0].shape, A_log.shape[1], dtype=u.dtype), []
    step = torch.log1p(dt.exp())
    for t in range(u.shape[1]):
        h = torch.exp(-step[:, t, :, None] * A_log.exp()) * h + (step * u)[:, t, :, None] * B[:, t, None]
        ys.append((h * C[:, t, None]).sum(-1) + D * u[:, t])
    return torch.stack(ys, 1) * F.silu(z)


def one_way(w: Weights, x: Tensor, z: Tensor, end: str, A_log: str) -> Tensor:
    u = convolved(w, f"conv1d{end}", x)
    rank = w[f"dt_proj{end}.weight"].shape[1]
    low, B, C = affine(w, f"x_proj{end}", u).split([rank, *[w[A_log].shape[1]] * 2], -1)
    return scanned(u, affine(w, f"dt_proj{end}", low), w[A_log], B, C, w[f"D{end}"], z)


def mixer_v2(w: Weights, x: Tensor, divisor: float = 1.0) -> Tensor:
    x, z = affine(w, "in_proj", x).chunk(2, -1)
    back = one_way(w, x.flip(1), z.flip(1), "_b", "A_b_log").flip(1)
    return affine(w, "out_proj", (one_way(w, x, z, "", "A_log") + back) / divisor)


def mixer_v1(w: Weights, x: Tensor) -> Tensor:
    """Compute the convolution and the projections once; both scans read them and share D."""
    x, z = affine(w, "in_proj", x).chunk(2, -1)
    u = convolved(w, "conv1d", x)
    rank = w["dt_proj.weight"].shape[1]
    low, B, C = affine(w, "x_proj", u).split([rank, *[w["A_log"].shape[1]] * 2], -1)
    parts = (u, affine(w, "dt_proj", low), B, C, z)
    there, back = ([each.flip(1) if flip else each for each in parts] for flip in (False, True))
    y = scanned(*there[:2], w["A_log"], *there[2:4], w["D"], there[4])
    return affine(w, "out_proj", y + scanned(*back[:2], w["A_b_log"], *back[2:4], w["D"], back[4]).flip(1))


MIXERS: dict[str, tuple[str, Callable[[Weights, Tensor], Tensor]]] = {
    "v1": ("vim_v1_mixer: {name: it, dim: 6, state: 3, %s}", mixer_v1),
    "v2": ("vim_v2_mixer: {name: it, dim: 6, state: 3, merge: sum, %s}", mixer_v2),
    "v2_mean": ("vim_v2_mixer: {name: it, dim: 6, state: 3, %s}", lambda w, x: mixer_v2(w, x, 2.0)),
}


@pytest.mark.parametrize("options", ["kernel: 2, rank: 3, bias: true, conv_bias: false", "kernel: 1, expand: 1.4"])
@pytest.mark.parametrize("kind", MIXERS)
def test_vision_mamba_mixers(kind: str, options: str) -> None:
    step, truth = MIXERS[kind]
    model, w = built(spec(6, step % options, use="mamba") + 'checkpoint: {it: ""}')
    for length in (1, 7):
        same(model, w, truth, draw(2, length, 6))


PAIRS = """
seqblocks: 1
use: [mamba]
model:
  input: {features: 6}
  steps:
    - repeat:
        name: pairs
        index: pair
        times: 2
        steps:
          - scan:
              order: [forward, reverse]
              own: all
              merge: sum
              steps:
                - residual: {name: block, steps: [rms_norm: {name: norm, eps: 1e-5}, vim_v2_mixer: {name: mixer, dim: 6, state: 2}]}
checkpoint:
  "pairs.{pair}.scan.fwd.block": "layers.{2 * pair}"
  "pairs.{pair}.scan.rev.block": "layers.{2 * pair + 1}"
  "pairs.{pair}.scan.fwd.block.mixer": "layers.{2 * pair}.mixer"
  "pairs.{pair}.scan.rev.block.mixer": "layers.{2 * pair + 1}.mixer"
"""  # noqa: E501 - a line of YAML


def pairs(w: Weights, x: Tensor) -> Tensor:
    """`if_bidirectional`: pairs of layers run in parallel, one on the flipped sequence. Their outputs are added, and so
    is the residual stream of both, which doubles it."""
    hidden, stream = x, torch.zeros_like(x)
    for first in (0, 2):
        given = stream + hidden
        out = []
        for layer, flip in ((first, False), (first + 1, True)):
            own = {name.removeprefix(f"layers.{layer}.mixer."): p for name, p in w.items()}
            inner = given.flip(1) if flip else given
            y = mixer_v2(own, rms(inner, 1e-5) * w[f"layers.{layer}.norm.weight"], 2.0)
            out.append(y.flip(1) if flip else y)
        hidden, stream = out[0] + out[1], 2 * given
    return stream + hidden


def test_vision_mamba_layers_in_pairs() -> None:
    model, w = built(PAIRS)
    same(model, w, pairs, draw(2, 5, 6))


def test_initial_values_of_vision_mamba() -> None:
    """Steps are between 0.001 and 0.1, those of version 2's backward direction 0.693. Output projections are scaled by
    the depth."""
    model = seqblocks.build("vim_tiny", set={"depth": 9, "dim": 64, "classes": 3})
    there, back = (
        torch.cat(
            [F.softplus(model.get_parameter(f"layers.{i}.block.mixer.scan.{order}.dt_proj.bias")) for i in range(9)]
        )
        for order in ("fwd", "rev")
    )
    assert there.min() >= 9.9e-4
    assert there.max() <= 0.101
    assert (there.log().std() > 1).item()  # uniform in the logarithm: ln(100) / sqrt(12) = 1.33
    assert torch.equal(back, torch.full_like(back, 2).log())
    out = model.get_parameter("layers.4.block.mixer.out_proj.weight")
    assert 0.9 < out.abs().max().item() * (128 * 9) ** 0.5 <= 1
    patch = model.get_parameter("patch_embed.weight")
    assert abs(patch.std().item() * (3 * 16**2) ** 0.5 * 0.8796 - 1) < 0.02  # 49,152 draws
    one = seqblocks.build_text(spec(64, "vim_v1_mixer: {dim: 64}", use="mamba"))
    steps = F.softplus(one.get_parameter("vim_v1_mixer.dt_proj.bias"))
    assert 9.9e-4 <= steps.min() < steps.max() <= 0.101


def test_initial_values_of_mamba() -> None:
    """`dt_init: constant` with its scale, and other bounds of the steps."""
    more = "rank: 4, dt_scale: 3, dt_random: false, dt_min: 0.1, dt_max: 0.4, dt_floor: 0.2"
    model = seqblocks.build_text(spec(64, f"mamba_mixer: {{name: it, dim: 64, {more}}}", use="mamba"))
    assert torch.equal(model.get_parameter("it.dt_proj.weight"), torch.full((128, 4), 1.5))
    steps = F.softplus(model.get_parameter("it.dt_proj.bias"))
    torch.testing.assert_close(steps.min().item(), 0.2)  # half of the draws are below it
    assert 0.38 < steps.max().item() <= 0.4001


def spread(model: SequenceModel, *names: str) -> list[float]:
    """Return the standard deviation of each parameter, in float64."""
    return [model.get_parameter(name).detach().double().std().item() for name in names]


def test_initial_values_of_rwkv6() -> None:
    """The maps of the mixer are Glorot-uniform with a gain of 2^-2.5, those of the network normal."""
    mixer = seqblocks.build_text(spec(64, "rwkv6_mixer: {name: it, dim: 64, heads: 2, mix_rank: 16}", use="rwkv6"))
    bound = (6 / (64 + 5 * 16)) ** 0.5 / 2**2.5
    for name in ("mix_in", "mix_r", "mix_w", "mix_k", "mix_v", "mix_g"):
        assert 0.9 * bound < mixer.get_parameter(f"it.{name}.weight").abs().max().item() <= bound, name
    network = seqblocks.build_text(spec(64, "rwkv6_channel_mixer: {name: it, dim: 64}", use="rwkv6"))
    found = spread(network, "it.key.weight", "it.value.weight", "it.receptance.weight")
    torch.testing.assert_close(found, [0.02] * 3, rtol=0.1, atol=0)


def test_initial_values_of_griffin() -> None:
    """The variance of output projections is 2 / layers over their width, that of the convolution 0.01 over its taps."""
    mixer = "[{griffin_mixer: {name: mixer, dim: 64, heads: 2, layers: 8}}]"
    layer = f"griffin_layer: {{name: it, dim: 64, hidden: 128, layers: 8, mixer: {mixer}}}"
    model = seqblocks.build_text(spec(64, layer, use="griffin"))
    mixer = "it.temporal.mixer.mixer"
    found = spread(model, f"{mixer}.linear_out.weight", "it.channel.down_proj.weight", f"{mixer}.conv_1d.weight")
    torch.testing.assert_close(found, [0.0625, 0.0442, 0.05], rtol=0.15, atol=0)
    model = seqblocks.build_text(spec(64, "griffin_attention: {name: it, dim: 64, heads: 2, layers: 8}", use="griffin"))
    torch.testing.assert_close(spread(model, "it.o_proj.weight"), [0.0625], rtol=0.1, atol=0)


# --- DeltaNet ---------------------------------------------------------------------------------------------------------


KEY_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu_plus_one": lambda x: torch.where(x >= 0, 1 + x, x.exp()),
    "none": lambda x: x,
}


def deltanet(w: Weights, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    q, k = (convolved(w, f"{n}_conv1d", affine(w, f"{n}_proj", x), activation).unflatten(-1, (2, -1)) for n in "qk")
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    v = convolved(w, "v_conv1d", affine(w, "v_proj", x)).unflatten(-1, (2, -1))
    beta, S, os = affine(w, "b_proj", x).sigmoid()[..., None], x.new_zeros(len(x), 2, k.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        u = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        os.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / k.shape[-1] ** 0.5)
    return affine(w, "o_proj", (rms(torch.stack(os, 1), 1e-5) * w["o_norm.weight"]).flatten(-2))


@pytest.mark.parametrize("activation", KEY_MAPS)
def test_deltanet_with_other_activations(activation: str) -> None:
    step = f"deltanet_mixer: {{name: it, dim: 6, heads: 2, activation: {activation}}}"
    model, w = built(spec(6, step, use="deltanet") + 'checkpoint: {it: ""}')
    same(model, w, lambda w, x: deltanet(w, x, KEY_MAPS[activation]), draw(2, 7, 6))


# --- xLSTM ------------------------------------------------------------------------------------------------------------

def test_biases_of_xlstm_large_are_initially_zero() -> None:
    model = seqblocks.build_text(spec(32, "xlstm_large_block: {name: it, dim: 32, heads: 4, bias: true}"))
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias") and "gate." not in name}
    assert len(biases) == 11
    assert not any(p.any() for p in biases.values())


def memory(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, heads: int, gate: str, normalize: bool) -> Tensor:
    q, k, v = (each.unflatten(-1, (heads, -1)) for each in (q, k, v))
    width, hs = q.shape[-1], []
    C = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=q.dtype)
    n, m = C[..., 0], C[..., 0, 0]
    for t in range(q.shape[1]):
        log_f, log_i = F.logsigmoid(f[:, t]), i[:, t] if gate == "exp" else F.logsigmoid(i[:, t])
        after = torch.maximum(log_f + m, log_i) if gate == "exp" else m
        keep, write = (log_f + m - after).exp()[..., None], (log_i - after).exp()[..., None]
        C = keep[..., None] * C + write[..., None] * k[:, t, :, :, None] * v[:, t, :, None]
        n, m = keep * n + write * k[:, t], after
        h = (q[:, t, :, :, None] * C).sum(-2) / width**0.5
        size = (q[:, t] * n).sum(-1).abs() / width**0.5
        hs.append(h / (torch.maximum(size, (-m).exp()) + 1e-4)[..., None] if normalize else h)
    return torch.stack(hs, 1).flatten(-2)


def large(gate: str, normalize: bool) -> Callable[[Weights, Tensor], Tensor]:
    def block(w: Weights, x: Tensor) -> Tensor:
        def norm(name: str, x: Tensor) -> Tensor:
            return rms(x, 1e-3) * w[f"{name}.weight"] + w[f"{name}.bias"]

        z = norm("norm_mlstm", x)
        q, k, v, o = (affine(w, f"mlstm_layer.{name}", z) for name in ("q", "k", "v", "ogate_preact"))
        i, f = (5 * torch.tanh(affine(w, f"mlstm_layer.{name}gate_preact", z) / 5) for name in "if")
        h = normed(memory(q, k, v, i, f, 2, gate, normalize), 2, 1e-3) * w["mlstm_layer.multihead_norm.weight"]
        h = (h + w["mlstm_layer.multihead_norm.bias"]) * torch.sigmoid(o)
        x = x + affine(w, "mlstm_layer.out_proj", h)
        z = norm("norm_ffn", x)
        return x + affine(w, "ffn.proj_down", F.silu(affine(w, "ffn.proj_up_gate", z)) * affine(w, "ffn.proj_up", z))

    return block


LARGE = """
seqblocks: 1
use: [xlstm]
model:
  input: {features: 8}
  steps:
    - xlstm_large_block:
        name: it
        dim: 8
        heads: 2
        qk_factor: 1.3
        v_factor: 0.5
        multiple: 4
        gate_cap: 5
        bias: true
        eps: 1e-3
        cell_eps: 1e-4
        INPUT
checkpoint: {it: ""}
"""
FUSED = {  # official name -> our names in one tensor, in the order of the rows
    "qkv_opreact": ("mlstm_layer", ("q", "k", "v", "o"), ("q", "k", "v", "ogate_preact")),
    "ifgate_preact": ("mlstm_layer", ("igate", "fgate"), ("igate_preact", "fgate_preact")),
    "proj_up_gate_z": ("ffn", ("swiglu.gate", "swiglu.up"), ("proj_up_gate", "proj_up")),
}


@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sigmoid", True), ("sigmoid", False)])
def test_xlstm_large(gate: str, normalize: bool) -> None:
    more = f"input_gate: {gate}\n        normalize: {str(normalize).lower()}"
    model, w = built(LARGE.replace("INPUT", more))
    same(model, w, large(gate, normalize), draw(2, 9, 8))


def test_xlstm_large_with_fused_weights() -> None:
    """`weight_mode: fused`: one matrix contains the rows of q, k, v and o, one both gates, and one half of the FFN."""
    model, w = built(LARGE.replace("        INPUT\n", ""))
    text, tensors = (
        LARGE.replace("        INPUT\n", "").replace('checkpoint: {it: ""}', 'checkpoint:\n  it: ""'),
        dict(w),
    )
    for fused, (place, ours, theirs) in FUSED.items():
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{place}.{name}.{kind}") for name in theirs]
            tensors[f"{place}.{fused}.{kind}"] = torch.cat(parts)
            starts = itertools.accumulate((len(part) for part in parts), initial=0)
            for name, start in zip(ours, starts, strict=False):
                own = f"ffn.{name}_{kind}" if place == "ffn" else f"mixer.{name}.{kind}"
                text += f"\n  it.{own}: {{slice: {place}.{fused}.{kind}, start: {start}}}"
    again = seqblocks.build_text(text, dtype=torch.float64)
    load_official(again, {name: p.detach() for name, p in tensors.items()})
    x = draw(1, 4, 8)
    assert torch.equal(again(x), model(x))
    wrong = seqblocks.build_text(text.replace("start: 20", "start: 28"), dtype=torch.float64)
    with pytest.raises(seqblocks.RunError, match=r"qkv_opreact\.weight must have 4 from 28"):
        load_official(wrong, {name: p.detach() for name, p in tensors.items()})


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu": F.relu, "squared_relu": lambda x: x * x * (x > 0), "sigmoid": torch.sigmoid,
    "silu": F.silu, "selu": lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * torch.expm1(x)),
}  # fmt: skip


def scalar(w: dict[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    """Compute the sLSTM layer for 2 heads of width 3, with our names; the official ones are swapped."""

    def heads(name: str, x: Tensor) -> Tensor:
        return torch.einsum("bshi,hoi->bsho", x.unflatten(-1, (2, 3)), w[f"mixer.layer.{name}.weight"])

    gates = [heads(name, c if name in "if" else x) for name in "ifzo"]
    y = cell = n = m = torch.zeros(x.shape[0], 2, 3, dtype=x.dtype)
    ys = []
    for t in range(x.shape[1]):
        r = torch.einsum("bhj,hjgd->gbhd", y, w["mixer.layer.cell.recurrent"])
        i, f, z, o = (
            g[:, t] + r[at] + w[f"mixer.layer.cell.{name}_bias"]
            for at, (name, g) in enumerate(zip("ifzo", gates, strict=True))
        )
        through = m + F.logsigmoid(f)
        after = torch.maximum(i, through) if t else i
        write, keep = (i - after).exp(), (through - after).exp() if t else torch.zeros_like(i)
        cell, n, m = keep * cell + write * torch.tanh(z), keep * n + write, after
        y = torch.sigmoid(o) * cell / n
        ys.append(y)
    return normed(torch.stack(ys, 1).flatten(-2), 2)


@pytest.mark.parametrize(("activation", "kernel"), [(name, 0 if name == "relu" else 3) for name in ACTIVATIONS])
def test_slstm_block(activation: str, kernel: int) -> None:
    """The norm of the heads has no weight, the feed-forward network has biases, and each official activation is tested.

    With kernel 0 there is no convolution, and all gates read the block's normalised input.
    """
    rest = f"kernel: {kernel}, gain: none, bias: true, expand: 1, multiple: 2, activation: {activation}"
    model, _ = built(spec(6, f"slstm_block: {{name: it, dim: 6, heads: 2, {rest}}}"))
    own = {name.removeprefix("it."): p for name, p in model.named_parameters()}

    def block(w: Weights, x: Tensor) -> Tensor:
        z = normed(x) * (1 + w["mixer.x.weight"])
        x = x + scalar(w, z, convolved(w, "mixer.c", z) if kernel else z)
        g, u = affine(w, "ffn.net.proj_up", normed(x) * (1 + w["ffn.layer_norm.weight"])).chunk(2, -1)
        return x + affine(w, "ffn.net.proj_down", ACTIVATIONS[activation](g) * u)

    same(model, own, block, draw(2, 6, 6))


def test_slstm_weights_of_the_cuda_backend() -> None:
    """The CUDA backend's recurrent matrices map from axis 1 to axis 2, and its biases are ordered by head."""
    block = "slstm_layer: {name: it, gates: input, dim: 12, heads: 3}"
    model, _ = built(spec(12, block))
    own = {name.removeprefix("it."): p.detach() for name, p in model.named_parameters()}
    tensors = {theirs: own[f"{ours}.weight"] for ours, theirs in zip("ifzo", ("f", "i", "z", "o"), strict=True)}
    tensors = {f"{name}gate.weight": p for name, p in tensors.items()} | {"group_norm.weight": own["head_norm.weight"]}
    tensors["slstm_cell._recurrent_kernel_"] = own["cell.recurrent"].flatten(2)
    tensors["slstm_cell._bias_"] = torch.stack([own[f"cell.{name}_bias"] for name in "ifzo"], 1).flatten()
    maps = "it.cell.recurrent: {reshape: slstm_cell._recurrent_kernel_}"
    for part, name in enumerate("ifzo"):
        maps += f", it.cell.{name}_bias: {{split: slstm_cell._bias_, axis: 1, parts: 4, part: {part}}}"
    again = seqblocks.build_text(spec(12, block) + f"checkpoint: {{it: '', {maps}}}", dtype=torch.float64)
    load_official(again, tensors)
    assert torch.equal(again(draw(1, 4, 12)), model(draw(1, 4, 12)))


def test_initial_values_of_the_slstm() -> None:
    """`bias_init: small_init` and `recurrent_weight_init: standard`, in a user-defined step."""
    init = "{f_bias: 'linspace(3, 6)', recurrent: 'uniform(-1 / sqrt(12), 1 / sqrt(12))'}"
    gates = (f"linear: {{from: input, features: 12, as: {name}}}" for name in "ifzo")
    cell = seqblocks.build_text(spec(12, *gates, f"slstm: {{i: i, f: f, z: z, o: o, heads: 3, init: {init}}}")).slstm
    assert torch.equal(cell.f_bias, torch.tensor([3.0, 4, 5, 6]).expand(3, 4))
    assert 0.9 < cell.recurrent.abs().max().item() * 12**0.5 <= 1


def test_dropout_is_in_the_official_places() -> None:
    """Dropout follows the mLSTM layer and the network. It follows the sLSTM cell, but precedes the norm of its heads.
    """
    for step in ("mlstm_layer", "gated_ffn"):
        model, _ = built(spec(8, f"{step}: {{dim: 8, dropout: {1 - 1e-9}}}"))
        assert not model.train()(draw(1, 5, 8)).any()
        assert model.eval()(draw(1, 5, 8)).all()
    step = "slstm_layer: {gates: input, dim: 16, heads: 2, dropout: 0.5, gain: none}"
    model, _ = built(spec(16, step))
    y = model.train()(draw(2, 5, 16))
    assert y.unflatten(-1, (2, 8)).mean(-1).abs().max() <= 1e-14  # 8 numbers of order 1, centred by a norm
    assert not torch.equal(y, model.eval()(draw(2, 5, 16)))


# --- Vision-LSTM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 12), (12, 20)], ids=str)
def test_positions_of_another_grid(size: tuple[int, int]) -> None:
    """Overlapping patches use the positions of patches that do not overlap. Images of another size use the positions of
    the first size, interpolated in the model's own precision."""
    embed = "patch_embed: {patch: 4, stride: 2, features: 3}, position_embed: {rows: 2, columns: 3}"
    model, w = built(
        f"seqblocks: 1\nmodel: {{input: {{image: {{size: [8, 12]}}}}, steps: [{embed}]}}\nexpect: {{params: 165}}"
    )

    def truth(w: Weights, x: Tensor) -> Tensor:
        y = F.conv2d(x, w["patch_embed.weight"], w["patch_embed.bias"], stride=2)
        table = F.interpolate(w["position_embed.weight"].permute(0, 3, 1, 2), size=y.shape[2:], mode="bicubic")
        return (y + table).flatten(2).transpose(1, 2)

    same(model, w, truth, draw(2, 3, *size))
