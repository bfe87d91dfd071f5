"""Write the cases of this folder: small models of flash-linear-attention, run on a CPU.

flash-linear-attention 0.6.0 computes in Triton, which needs a GPU. This script replaces the functions that its layers
call: recurrences by the package's naive functions; norms, convolutions and gates by its references or by the same
formula in torch. Everything is computed in float64. Weights are stored in float32, with noise added to each. Run it
where `fla` can be imported (the wheels fla_core and flash_linear_attention, without their dependencies), with torch,
transformers and einops:

    PYTHONPATH=WHEELS python tests/golden/fla/make.py

A case contains `config` (JSON), the weights `w/NAME`, `ids` [1, 36] and `logits` [1, 36, vocabulary] in float64.
"""

from __future__ import annotations

import importlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

warnings.filterwarnings("ignore")

FOLDER = Path(__file__).parent
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11, "intermediate_size": 12, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attn": ("LinearAttention", {"num_heads": 2}),
    "linear_attn_elu": ("LinearAttention", {"num_heads": 2, "feature_map": "elu", "norm_feature_map": True}),
    "linear_attn_t2r": ("LinearAttention", {"num_heads": 2, "feature_map": "t2r", "norm_k": True}),
    "linear_attn_hedgehog": (
        "LinearAttention", {"num_heads": 4, "num_kv_heads": 2, "feature_map": "hedgehog", "norm_feature_map": True}
    ),
    "linear_attn_dpfp": ("LinearAttention", {"num_heads": 2, "feature_map": "dpfp", "norm_q": True, "norm_k": True}),
    "gla": ("GLA", {"num_heads": 2}),
    "gla_shared": ("GLA", {"num_heads": 4, "num_kv_heads": 2}),
    "retnet": ("RetNet", {"num_heads": 2, "norm_eps": 1e-5}),
    "retnet_shared": ("RetNet", {"num_heads": 4, "num_kv_heads": 2}),
    "gated_deltaproduct": (
        "GatedDeltaProduct", {"num_heads": 2, "head_dim": 6, "num_householder": 3, "use_forget_gate": True,
                              "allow_neg_eigval": True}
    ),
    "gated_deltaproduct_kept": ("GatedDeltaProduct", {"num_heads": 2, "head_dim": 8, "num_householder": 2}),
    "delta_net": ("DeltaNet", {"num_heads": 2, "allow_neg_eigval": True}),
    "delta_net_gated": ("DeltaNet", {"num_heads": 4, "use_gate": True, "expand_v": 2.0}),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 6, "num_v_heads": 4}),
    "gated_deltanet_sigmoid": (
        "GatedDeltaNet", {"num_heads": 2, "head_dim": 6, "output_gate_activation": "sigmoid", "allow_neg_eigval": True}
    ),
    "kda": ("KDA", {"num_heads": 2, "head_dim": 6}),
    "kda_bounded": (
        "KDA", {"num_heads": 1, "num_v_heads": 2, "head_dim": 8, "expand_v": 0.5, "safe_gate": True,
                "lower_bound": -5.0}
    ),
    "hgrn2": ("HGRN2", {"expand_ratio": 8}),
    "rwkv7": (
        "RWKV7", {"head_dim": 8, "num_hidden_layers": 3, "decay_low_rank_dim": 4, "gate_low_rank_dim": 5,
                  "a_low_rank_dim": 4, "v_low_rank_dim": 3}
    ),
    "sparse_nsa": (
        "NSA", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, "block_counts": 4, "window_size": 6}
    ),
}  # fmt: skip


class InFloat64:
    """A replacement of the module `torch` that makes code which casts to float32 compute in float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def naive(name: str) -> Any:
    module = importlib.import_module(f"fla.ops.{name}")
    module.torch = InFloat64()
    return module


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def swapped(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


# --- recurrences, by the naive functions of the package ---------------------------------------------------------------


def gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, g: Tensor | None = None, **_: Any) -> Any:
    return naive("gla.naive").naive_recurrent_gla(q, k, v, gk if g is None else g)


def retention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
    return naive("retention.naive").naive_retention(*swapped(q, k, v)).transpose(1, 2), None


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **_: Any) -> Any:
    q, k = (unit(q), unit(k)) if use_qk_l2norm_in_kernel else (q, k)
    y, _ = naive("delta_rule.naive").delta_rule_recurrence(*swapped(q, k, v, beta))
    return y.transpose(1, 2), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    allow_neg_eigval: bool, **_: Any,
) -> Any:  # fmt: skip
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    g = -A_log.exp() * F.softplus(g + dt_bias)
    q, k = (unit(x).repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    y, _ = naive("gated_delta_rule.naive").naive_recurrent_gated_delta_rule(q, k, v, beta, g)
    return y, None


def delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, **_: Any
) -> Any:
    g = torch.zeros_like(beta) if g is None else g
    return naive("gated_delta_rule.naive").naive_recurrent_gated_delta_rule(unit(q), unit(k), v, beta, g)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, normalize: bool, **_: Any) -> Any:
    return naive("linear_attn.naive").naive_recurrent_linear_attn(q, k, v, normalize=normalize)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    allow_neg_eigval: bool, lower_bound: float | None, **_: Any,
) -> Any:  # fmt: skip
    gates = naive("kda.gate")
    if lower_bound is None:
        g = gates.naive_kda_gate(g, A_log, dt_bias, torch.float64)
    else:
        g = gates.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound, torch.float64)
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return naive("kda.naive").naive_recurrent_kda(unit(q), unit(k), v, g, beta)


def rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, kk: Tensor | None = None, b: Tensor | None = None, **_: Any
) -> Any:
    a, b = (a, b) if kk is None else (-kk, kk * a)
    q = r * math.sqrt(r.shape[-1])  # the naive function divides by this
    y, _ = naive("generalized_delta_rule.dplr.naive").dplr_recurrence(*swapped(q, k, v, a, b, w))
    return y.transpose(1, 2), None


def sparse(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor, block_size: int, block_counts: int,
    window_size: int, **_: Any,
) -> Tensor:  # fmt: skip
    of, scale = importlib.import_module("fla.ops.nsa.naive"), q.shape[-1] ** -0.5
    means, mean_values = (x.unflatten(1, (-1, block_size)).mean(2) for x in (k, v))
    chosen = of.naive_nsa_topk(q, means, block_counts, block_size, scale)
    compressed, _ = of.naive_nsa_compression(q, means, mean_values, block_size, scale)
    selected = of.naive_nsa_selection(q, k, v, chosen, block_size, scale)
    place = torch.arange(q.shape[1])
    seen = (place <= place[:, None]) & (place > place[:, None] - window_size)
    near, = swapped(F.scaled_dot_product_attention(*swapped(q, k, v), seen, scale=scale, enable_gqa=True))
    parts = zip((compressed, selected, near), (g_cmp, g_slc, g_swa), strict=True)
    return sum(y * gate.unsqueeze(-1) for y, gate in parts)  # type: ignore[return-value]


# --- norms, convolutions, gates ---------------------------------------------------------------------------------------


def rms_norm(self: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, **_: Any) -> Any:
    x = x if residual is None else x + residual
    y = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
    return (y, x) if prenorm else y


def layer_norm(self: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, **_: Any) -> Any:
    x = x if residual is None else x + residual
    y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
    return (y, x) if prenorm else y


def group_norm(self: Any, x: Tensor, **_: Any) -> Tensor:
    y = F.group_norm(x.flatten(0, -2), self.num_groups, self.weight, self.bias, self.eps)
    return y.view(x.shape)


def gated_norm(self: Any, x: Tensor, g: Tensor, **_: Any) -> Tensor:
    opening = g.sigmoid() if self.activation == "sigmoid" else F.silu(g)
    return rms_norm(self, x) * opening


def convolved(x: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    weight = weight.view(weight.shape[0], 1, -1)
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight, groups=len(weight)).transpose(1, 2)
    return F.silu(y) if activation else y


def convolution(self: Any, x: Tensor, **_: Any) -> Any:
    assert self.bias is None
    return convolved(x, self.weight, self.activation), None


def rotary(self: Any, q: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    half = q.shape[-1] // 2
    angles = torch.arange(q.shape[1])[:, None] * self.base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (x[:, None] for x in (angles.cos(), angles.sin()))
    turned = []
    for x in (q, k):
        a, b = x[..., :half], x[..., half:]
        turned.append(torch.cat([a * cos - b * sin, a * sin + b * cos], -1))
    return turned[0], turned[1]


def token_shift(x: Tensor, *_: Any, **__: Any) -> Any:
    return importlib.import_module("fla.modules.token_shift").token_shift_ref(x), None


def replace_kernels() -> None:
    """Replace the functions in the modules that import them."""
    of = importlib.import_module
    modules, layers = of("fla.modules"), "fla.layers."
    for name, forward in {
        "RMSNorm": rms_norm, "LayerNorm": layer_norm, "GroupNorm": group_norm, "FusedRMSNormGated": gated_norm,
        "ShortConvolution": convolution, "RotaryEmbedding": rotary,
    }.items():  # fmt: skip
        getattr(modules, name).forward = forward
    mlp = of("fla.modules.mlp")
    mlp.swiglu = lambda gate, up: F.silu(gate) * up
    mlp.swiglu_linear = lambda gate, up, weight, bias: F.linear(F.silu(gate) * up, weight, bias)
    for layer, functions in {
        "linear_attn": {"fused_recurrent_linear_attn": linear_attention},
        "gated_deltaproduct": {"fused_recurrent_gated_delta_rule": delta_product},
        "gla": {"fused_recurrent_gla": gla, "chunk_gla": gla},
        "multiscale_retention": {"fused_recurrent_retention": retention, "chunk_retention": retention},
        "delta_net": {"fused_recurrent_delta_rule": delta_rule, "chunk_delta_rule": delta_rule},
        "gated_deltanet": {
            "fused_recurrent_gated_delta_rule": gated_delta_rule, "chunk_gated_delta_rule": gated_delta_rule,
            "causal_conv1d": lambda x, weight, activation, **_: (convolved(x, weight, activation), None),
        },
        "kda": {"fused_recurrent_kda": kda, "chunk_kda": kda},
        "nsa": {"parallel_nsa": sparse},
        "hgrn2": {
            "fused_recurrent_gla": gla, "chunk_gla": gla, "swish": F.silu,
            "rms_norm_linear": lambda x, weight, bias, matrix, more: F.linear(
                x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight, matrix, more
            ),
        },
        "rwkv7": {
            "fused_mul_recurrent_rwkv7": rwkv7, "chunk_rwkv7": rwkv7, "token_shift": token_shift, "l2_norm": unit,
            "fused_addcmul_rwkv7": of("fla.ops.rwkv7.fused_addcmul").torch_addcmul_rwkv7,
            "fused_k_rwkv7": of("fla.ops.rwkv7.fused_k_update").k_update_ref,
            "gate_output_correction": lambda o, r, k, r_k, v, g: (
                of("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref(o, r, k, r_k, v, g)
            ),
        },
    }.items():  # fmt: skip
        for name, function in functions.items():
            setattr(of(layers + layer), name, function)
    of("fla.models.hgrn2.modeling_hgrn2").torch = InFloat64()
    feed_forward = of("fla.models.rwkv7.modeling_rwkv7")
    feed_forward.token_shift = token_shift
    feed_forward.ACT2FN = {"sqrelu": lambda x: x.relu().square()}


def write(case: str) -> None:
    name, options = CASES[case]
    models = importlib.import_module("fla.models")
    torch.manual_seed(sorted(CASES).index(case))
    config = getattr(models, f"{name}Config")(**{**SMALL, **options})
    model = getattr(models, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    weights = {f"w/{key}": tensor.float().numpy() for key, tensor in model.state_dict().items()}
    ids = torch.randint(0, config.vocab_size, (1, 36))
    with torch.no_grad():
        logits = model.double().eval()(ids, use_cache=False).logits
    data = {"ids": ids.numpy().astype(np.int8), "logits": logits.numpy(), **weights}
    text = json.dumps({k: v for k, v in config.to_dict().items() if k not in ("torch_dtype", "dtype")})
    np.savez_compressed(FOLDER / f"{case}.npz", config=np.array(text), **data)
    print(case, float(logits.std()), rearrange(logits, "b t v -> (b t v)").abs().max().item())


if __name__ == "__main__":
    replace_kernels()
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    for each in CASES:
        write(each)
