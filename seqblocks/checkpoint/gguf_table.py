"""Families of transformers that llama.cpp runs: the entries of config.json that it computes, and its tensors.

Facts about llama.cpp are those of `src/models/` and `conversion/` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.checkpoint.gguf_changes import (
    CORRECTION,
    DT_BIAS,
    INTERLEAVED,
    MAMBA,
    MAMBA2,
    ONE_PLUS,
    Change,
    Pieces,
    column,
    grouped,
    half,
    negative_exp,
    one_plus,
    qkv_by_kind,
    squeezed,
    times,
    times_of,
)
from seqblocks.checkpoint.gguf_found import Found, Metadata, same
from seqblocks.graph import ParallelNode


class Family(NamedTuple):
    """A model_type of transformers.

    name: of llama.cpp's architecture. computes: the entries of config.json that its graph computes, beside COMMON.
    fixed: what it assumes of others; without one, the default of transformers. scaling: kinds of scaled positions,
    and `mscale` if those entries of yarn may be given.
    released: the scaling of all releases, accepted although llama.cpp computes other angles, as docs/models.md says.
    pieces: patterns of official names. changes: patterns of tensors without `blk.N.`. more: further metadata. refuse:
    yields reasons why a model does not fit. layout: of the `checkpoint:` map, with the official names. head: whether
    the file must have a head even if it is tied. names: the architecture whose names of tensors the package gguf has.
    """

    name: str
    computes: str = ""
    fixed: Mapping[str, Any] = {}
    scaling: str = "linear yarn"
    released: Mapping[str, Any] = {}
    pieces: tuple[tuple[str, Pieces], ...] = ()
    changes: tuple[tuple[str, Change], ...] = ()
    more: Callable[[Found], Metadata] = lambda found: {}
    refuse: Callable[[Found], Iterator[str]] = lambda found: iter(())
    layout: str = "official"
    head: bool = False
    names: str = ""


# Entries that mean the same in all families, or that only say how initial weights are drawn.
COMMON = """
model_type hidden_size num_hidden_layers vocab_size intermediate_size num_attention_heads num_key_value_heads
rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps tie_word_embeddings tie_embedding rope_theta rope_parameters
rope_scaling max_position_embeddings original_max_position_embeddings initializer_range time_step_min time_step_max
time_step_floor rescale_prenorm_residual
"""


def _hybrid(verb: str, what: str) -> Callable[[Found], Iterator[str]]:
    """Return a function that refuses models without attention, or without layers of the other kind."""

    def refuse(found: Found) -> Iterator[str]:
        for each, kind in (("attention", "attention"), (verb, what)):
            if found.op(each) is None:
                yield f"no layer is {kind}"

    return refuse


# --- families with rules of their own --------------------------------------------------------------------------------


def _no_experts(found: Found) -> Metadata:
    return {} if found.experts else {"expert_count": 0, "expert_used_count": 0}


def _final_cap(found: Found) -> Metadata:
    op: Any = next((node.op for node in found.outside if node.verb == "soft_cap"), None)
    return {"final_logit_softcapping": float(op.cap)} if op else {}


def _gemma2(found: Found) -> Metadata:
    return {"attn_logit_softcapping": float(found.op("attention").soft_cap), **_final_cap(found)}


def _gemma_refuses(found: Found) -> Iterator[str]:
    given, head = found.config.get("query_pre_attn_scalar", 256), found.config.get("head_dim", 256)
    if given != head:
        yield f"query_pre_attn_scalar is {given}, but it uses head_dim, {head}"


def _gemma2_refuses(found: Found) -> Iterator[str]:
    yield from _gemma_refuses(found)
    if not found.op("attention").soft_cap or not _final_cap(found):
        yield "attn_logit_softcapping or final_logit_softcapping is null, but it always limits scores and logits"
    if "output.weight" in found.shapes:
        yield "its head is the embedding"


def _ssm_factors(x: Tensor, found: Found, layer: int) -> Tensor:
    """Multiply the rows of Falcon-H1's input projection (z, x, B, C, dt) by their factors."""
    heads, channels = found.shape("time_step", "bias", layer)[0], found.shape("causal_conv", "weight", layer)[0]
    inner = x.shape[0] - channels - heads
    states = (channels - inner) // 2
    factors = torch.tensor(found.config.get("ssm_multipliers") or [1.0] * 5, device=x.device)
    sizes = torch.tensor([inner, inner, states, states, heads], device=x.device)
    rows = factors.repeat_interleave(sizes, output_size=x.shape[0])
    return x * rows[:, None] * float(found.config.get("ssm_in_multiplier") or 1.0)


def _falcon_h1_refuses(found: Found) -> Iterator[str]:
    norms = [op for op in found.ops("rms_norm") if getattr(op, "gate", "none") == "after"]
    if norms:
        yield "mamba_norm_before_gate is true, but it gates before the norm"


def _granite(found: Found) -> Family:
    """Return the family of a Granite 4: with Mamba-2 or without, with experts or without."""
    sparse = found.experts is not None
    name = "granitehybrid" if found.op("time_step") else "granitemoe" if sparse else "granite"
    suffix, official = ("_shexp" if sparse else ""), r"^.*\.(\d+)\.shared_mlp\."
    pieces: tuple[tuple[str, Pieces], ...] = (
        (
            official + r"input_linear\.weight$",
            tuple((rf"blk.\1.ffn_{part}{suffix}.weight", half(at)) for at, part in enumerate(("gate", "up"))),
        ),
        (official + r"output_linear\.weight$", ((rf"blk.\1.ffn_down{suffix}.weight", None),)),
        (
            r"^.*\.(\d+)\.block_sparse_moe\.input_linear\.weight$",
            tuple((rf"blk.\1.ffn_{part}_exps.weight", half(at)) for at, part in enumerate(("gate", "up"))),
        ),
        DT_BIAS,
    )
    return Family(
        name,
        "layer_types mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv attention_bias "
        "embedding_multiplier logits_scaling residual_multiplier attention_multiplier position_embedding_type "
        "num_local_experts num_experts_per_tok shared_intermediate_size",
        scaling="linear yarn llama3",
        pieces=pieces,
        changes=(*INTERLEAVED, *MAMBA2),
        more=_granite_metadata,
        refuse=_hybrid("time_step", "Mamba-2") if name == "granitehybrid" else lambda found: iter(()),
    )


def _granite_metadata(found: Found) -> Metadata:
    names = {
        "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling", "attention.scale": "attention_multiplier",
    }  # fmt: skip
    factors: Metadata = {ours: float(found.config.get(theirs) or 1.0) for ours, theirs in names.items()}
    return {**factors, "rope.scaling.finetuned": found.op("rotary") is not None}  # whether positions rotate


def _bamba(found: Found) -> Metadata:
    return {"rope.scaling.finetuned": True}  # granitehybrid then rotates queries and keys


def _falcon_mamba(found: Found) -> Metadata:
    return {"ssm.dt_b_c_rms": True}  # whether step sizes, B and C are normalised


def _before_norms(x: Tensor, found: Found, layer: int) -> Tensor:
    """Scale the rows before the norms of step sizes, B and C so that `layer_norm_epsilon` does the same in them."""
    outer, inner = (float(found.config.get(name, usual)) for name, usual in MAMBA_EPSILONS)
    return x * math.sqrt(outer / inner)


MAMBA_EPSILONS = (("layer_norm_epsilon", 1e-5), ("mixer_rms_eps", 1e-6))


def _falcon_mamba_refuses(found: Found) -> Iterator[str]:
    inner, dim = found.size("ssm_out.weight", 1), found.shapes["token_embd.weight"][1]
    if inner != 2 * dim:
        yield f"it has {2 * dim} inner features at width {dim}, not {inner}"


def _minimax(found: Found) -> Metadata:
    return {
        "attention.head_count_kv": found.op("attention").shared,
        "attention.recurrent_layers": found.has("attn_qkv.weight"),
        "residual_scale": float(found.config.get("mlp_alpha_factor", 1)),
    }


def _minimax_refuses(found: Found) -> Iterator[str]:
    yield from _hybrid("linear_attention", "linear_attention")(found)
    factors = [found.config.get(f"{part}_alpha_factor", 1) for part in ("full_attn", "linear_attn", "mlp")]
    if len(set(factors)) > 1:
        yield f"full_attn_alpha_factor, linear_attn_alpha_factor and mlp_alpha_factor differ: {factors}"
    if (eps := found.config.get("rms_norm_eps", 1e-5)) not in (1e-5, 1e-6):  # that of releases, and the exact one
        yield f"rms_norm_eps is {eps}, but it is also that of the norm in linear attention, where 1e-06 is needed"


def _beta(part: str = "") -> Change:
    """Multiply the last matrices of a part, by default attention of either kind, by the factor of its result."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        kind = part or ("full_attn" if found.op("attention", layer) else "linear_attn")
        return x * float(found.config.get(f"{kind}_beta_factor", 1))

    return change


KEY_EPSILON = 1e-6  # which Qwen3-Next adds to a key's sum of squares


def _qwen3_next(found: Found) -> Metadata:
    op = found.op("linear_attention")
    head = found.size("ssm_norm.weight", 0)
    return {
        "attention.head_count_kv": found.op("attention").shared,
        "ssm.conv_kernel": found.op("causal_conv").kernel,
        "ssm.state_size": head,
        "ssm.group_count": op.heads,
        "ssm.time_step_rank": op.value_heads,
        "ssm.inner_size": op.value_heads * head,
        "attention.recurrent_layers": found.has("ssm_a"),
    }


def _qwen3_next_refuses(found: Found) -> Iterator[str]:
    yield from _hybrid("linear_attention", "linear_attention")(found)
    if found.config.get("linear_key_head_dim", 128) != found.config.get("linear_value_head_dim", 128):
        yield "linear_key_head_dim and linear_value_head_dim differ"
    if (eps := found.config.get("rms_norm_eps", KEY_EPSILON)) != KEY_EPSILON:
        yield f"rms_norm_eps is {eps}, but it adds the same to a key's sum of squares, where {KEY_EPSILON} is needed"


def _qkvz(gate: bool) -> Change:
    """Return the rows of all queries, keys and values, or those of the gates z; the file stores them by key heads."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        rows = x.unflatten(0, (found.op("linear_attention", layer).heads, -1))
        key = found.config.get("linear_key_head_dim", 128)
        value = (rows.shape[1] - 2 * key) // 2
        q, k, v, z = rows.split([key, key, value, value], 1)
        return z.flatten(0, 1) if gate else torch.cat([part.flatten(0, 1) for part in (q, k, v)])

    return change


def _qwen3_5(found: Found) -> Metadata:
    """Positions have parts in turn for time, rows and columns of images, which are all equal for text."""
    rotary, head = found.op("rotary"), found.size("attn_q_norm.weight", 0)
    pairs = (rotary.features or head) // 2
    return {**_qwen3_next(found), "rope.dimension_sections": [(pairs + 2 - at) // 3 for at in range(3)] + [0]}


def _by_turns(rows: bool) -> Change:
    """Order heads of values by their place among those of a key: llama.cpp repeats all keys, transformers each.

    rows: whether they are rows of a tensor, or its columns.
    """

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        op = found.op("linear_attention", layer)
        if not rows:
            return x.unflatten(1, (op.heads, op.value_heads // op.heads, -1)).transpose(1, 2).flatten(1, 3)
        # Queries and keys come before the values; matrices of one row per head have none.
        keys = max(x.shape[0] - op.value_heads * int(found.config.get("linear_value_head_dim", 128)), 0)
        heads = x[keys:].unflatten(0, (op.heads, op.value_heads // op.heads, -1)).transpose(0, 1).flatten(0, 2)
        return torch.cat([x[:keys], heads])

    return change


QWEN35_HEADS = (
    (r"(attn_qkv|attn_gate|ssm_conv1d|ssm_alpha|ssm_beta)\.weight|ssm_dt\.bias|ssm_a", _by_turns(True)),
    (r"ssm_out\.weight", _by_turns(False)),
)


def _kimi(found: Found) -> Metadata:
    """Keys and values of latent attention are cached as one head, which all heads share."""
    layers = found.has("attn_kv_a_norm.weight")
    rank, common = found.size("attn_kv_a_norm.weight", 0), int(found.config.get("qk_rope_head_dim", 64))
    return {
        "attention.head_count_kv": same([int(latent) for latent in layers]),
        "attention.key_length": rank + common,
        "attention.value_length": rank,
        "attention.key_length_mla": int(found.config.get("qk_nope_head_dim", 128)) + common,
        "attention.value_length_mla": found.size("attn_v_b.weight", 1),
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": common,
        "ssm.conv_kernel": found.op("causal_conv").kernel,
        "kda.head_dim": found.size("ssm_norm.weight", 0),
        "expert_shared_count": int(found.config.get("num_shared_experts") or 1),
    }


def _kimi_refuses(found: Found) -> Iterator[str]:
    kinds = found.has("attn_kv_a_norm.weight")
    if all(kinds) or not any(kinds):
        yield "it needs layers of both kinds of attention"
    elif found.op("linear_attention").heads != found.op("attention").heads:
        yield "both kinds of attention must have the same number of heads"
    sparse = found.has("ffn_down_exps.weight")
    if sparse != sorted(sparse) or not any(sparse):
        yield "layers with dense networks must come before those with experts"


def _keys_and_values(values: bool) -> Change:
    """Return the part of an expansion of latent keys and values that makes the keys, transposed, or the values."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        op = found.op("attention", layer) or found.op("latent_attention", layer)
        rows, head = x.unflatten(0, (op.heads, -1)), int(found.config.get("qk_nope_head_dim", 128))
        return rows[:, head:] if values else rows[:, :head].transpose(1, 2)

    return change


def _latent(found: Found) -> Metadata:
    """Keys and values of latent attention are cached as one head, which all heads share."""
    op, rank, experts = found.op("latent_attention"), found.size("attn_kv_a_norm.weight", 0), found.experts
    common = int(found.config.get("qk_rope_head_dim", 64))
    key = int(found.config.get("qk_nope_head_dim", 128)) + common
    made: Metadata = {
        "attention.head_count": op.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + common,
        "attention.value_length": rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": found.size("attn_v_b.weight", 1),
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": common,
        "rope.freq_base": float(found.op("rotary").base),
        "expert_shared_count": found.size("ffn_down_shexp.weight", 1) // found.size("ffn_down_exps.weight", -1),
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.top_groups,
        "attention.q_lora_rank": found.size("attn_q_a_norm.weight", 0),
    }
    return made | _latent_scaling(found.op("rotary").scaling, op.scale * math.sqrt(key) if op.scale else 1.0)


def _latent_scaling(scaling: Any, scores: float) -> Metadata:
    """Return how angles are scaled. scores: the factor of the scores relative to the usual one.

    llama.cpp multiplies cosines and sines by `attn_factor`, and scores by the square of `attn_factor` times
    1 + `yarn_log_multiplier` * log(factor).
    """
    if scaling.type == "linear":  # by 1
        return {}

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(scaling.factor) + 1.0

    both = scaling.mscale and scaling.mscale_all_dim
    usual = growth(scaling.mscale) / growth(scaling.mscale_all_dim) if both else growth(1)
    attention = scaling.attention_factor or usual
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_length,
        "rope.scaling.attn_factor": float(attention),
        "rope.scaling.yarn_log_multiplier": (math.sqrt(scores) / attention - 1) / math.log(scaling.factor),
    }


def _deepseek_refuses(found: Found) -> Iterator[str]:
    if found.experts is None:
        yield "no layer has experts"
    scaling = found.op("rotary").scaling
    if scaling.type == "yarn" and scaling.factor <= 1:
        yield f"its yarn has a factor above 1, not {scaling.factor}"


INNER_EPSILON = 1e-6  # of the norms inside latent attention, in transformers


def _before_norm(x: Tensor, found: Found, layer: int) -> Tensor:
    """Scale the rows before a norm of low rank so that `rms_norm_eps`, which llama.cpp adds, does the same."""
    return x * math.sqrt(float(found.config.get("rms_norm_eps", INNER_EPSILON)) / INNER_EPSILON)


def _before_norm_of_keys(x: Tensor, found: Found, layer: int) -> Tensor:
    """Do so for the rows of keys and values, which are followed by those of the part with positions."""
    rank = found.shape("latent_attention", "k_weight", layer)[1]
    return torch.cat([_before_norm(x[:rank], found, layer), x[rank:]])


def _channels(x: Tensor, found: Found, layer: int) -> Tensor:
    return x.reshape(1, x.shape[0], 1, -1)


def _nemotron(found: Found) -> Family:
    return Family(
        "nemotron_h_moe" if found.experts else "nemotron_h",
        "layers_block_type hybrid_override_pattern head_dim attention_head_dim mamba_num_heads mamba_head_dim n_groups "
        "ssm_state_size conv_kernel mlp_bias n_routed_experts num_experts_per_tok moe_intermediate_size "
        "moe_shared_expert_intermediate_size moe_latent_size norm_topk_prob routed_scaling_factor n_group topk_group",
        pieces=((r"\.dt_bias$", ((".dt.bias" if found.experts else ".dt_proj.bias", None),)), CORRECTION),
        changes=MAMBA2,
        more=_nemotron_metadata,
        refuse=_nemotron_refuses,
    )


def _nemotron_metadata(found: Found) -> Metadata:
    eps = found.config.get("layer_norm_epsilon", 1e-5)
    made: Metadata = {"attention.layer_norm_epsilon": float(eps)}
    if experts := found.experts:
        made |= {"expert_group_count": experts.groups, "expert_group_used_count": experts.top_groups}
        made |= {"expert_shared_count": 1}
        if latent := found.size("ffn_latent_down.weight", 0):
            made["moe_latent_size"] = latent
    return made


def _nemotron_refuses(found: Found) -> Iterator[str]:
    yield from _hybrid("time_step", "Mamba-2")(found)
    if found.experts and found.config.get("mlp_bias"):
        yield "mlp_bias is true, but its experts have none"
    if found.experts and any(found.has("ffn_down.weight")):
        yield "it has either dense networks or experts"


def _lfm2(found: Found) -> Metadata:
    return {"shortconv.l_cache": found.op("causal_conv").kernel}


def _neox(found: Found) -> Metadata:
    return {"use_parallel_residual": any(isinstance(node, ParallelNode) for node in found.nodes[0])}


def _neox_refuses(found: Found) -> Iterator[str]:
    if found.op("relu") or found.op("silu"):
        yield f"hidden_act is {found.config['hidden_act']}, but it computes gelu"


def _experts_part(at: int | None) -> Change:
    """Transpose the matrices of all experts; at: of rows in turn for gates (0) and values (1), or None for all."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        part = x if at is None else x[..., at::2]
        return part.transpose(1, 2) if part.dim() == 3 else part

    return change


GPT_OSS_ANGLES = {
    "type": "yarn", "factor": 32.0, "original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
GPT_OSS_PIECES: tuple[tuple[str, Pieces], ...] = (
    *(
        (
            rf"^.*\.(\d+)\.mlp\.experts\.gate_up_proj{official}$",
            tuple((rf"blk.\1.ffn_{part}_exps.{kind}", _experts_part(at)) for at, part in enumerate(("gate", "up"))),
        )
        for official, kind in (("", "weight"), ("_bias", "bias"))
    ),
    (r"^.*\.(\d+)\.mlp\.experts\.down_proj$", ((r"blk.\1.ffn_down_exps.weight", _experts_part(None)),)),
    (r"^.*\.(\d+)\.mlp\.experts\.down_proj_bias$", ((r"blk.\1.ffn_down_exps.bias", None),)),
    (r"\.sinks$", ((".sinks.weight", None),)),
)


FALCON_CHANGES = (
    *MAMBA,
    (r"ssm_[ad]", column),
    (r"ssm_norm\.weight", grouped),
    (r"ssm_in\.weight", _ssm_factors),
    (r"ssm_out\.weight", times("ssm_out_multiplier")),
    (r"attn_[qv]\.weight", times("attention_in_multiplier")),
    (r"attn_k\.weight", times("attention_in_multiplier", "key_multiplier")),
    (r"attn_output\.weight", times("attention_out_multiplier")),
    (r"ffn_gate\.(weight|bias)", times_of("mlp_multipliers", 0)),
    (r"ffn_down\.(weight|bias)", times_of("mlp_multipliers", 1)),
    (r"token_embd\.weight", times("embedding_multiplier")),
    (r"output\.weight", times("lm_head_multiplier")),
)

LATENT: tuple[str, Pieces] = (
    r"\.kv_b_proj\.weight$",
    ((".k_b_proj.weight", _keys_and_values(False)), (".v_b_proj.weight", _keys_and_values(True))),
)
MINIMAX_NAMES = (
    ("qkv_proj", "attn_qkv"), ("norm", "attn_norm_2"), ("output_gate", "attn_gate"), ("out_proj", "attn_output"),
)  # fmt: skip
DEEPSEEK = Family(
    "deepseek2",
    "first_k_dense_replace moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok n_group "
    "topk_group routed_scaling_factor norm_topk_prob kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim",
    scaling="yarn mscale",
    pieces=(LATENT, CORRECTION),
    changes=((r"attn_q_a\.weight", _before_norm), (r"attn_kv_a_mqa\.weight", _before_norm_of_keys)),
    more=_latent,
    refuse=_deepseek_refuses,
    head=True,
)
FAMILIES: dict[str, Family | Callable[[Found], Family]] = {
    "llama": Family(
        "llama", "attention_bias mlp_bias head_dim", scaling="linear yarn llama3 longrope", changes=INTERLEAVED
    ),
    "mistral": Family(
        "llama", "head_dim", {"sliding_window": None}, "linear yarn llama3 longrope", changes=INTERLEAVED
    ),
    "mixtral": Family(
        "llama", "head_dim num_local_experts num_experts_per_tok", scaling="linear yarn llama3", changes=INTERLEAVED
    ),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", "head_dim"),
    "qwen3_moe": Family(
        "qwen3moe", "head_dim num_local_experts num_experts_per_tok moe_intermediate_size", {"norm_topk_prob": True}
    ),
    "smollm3": Family("smollm3", "head_dim", changes=INTERLEAVED),
    "olmo2": Family("olmo2", head=True),
    "phi3": Family("phi3", scaling="longrope"),
    "gemma2": Family(
        "gemma2",
        "head_dim query_pre_attn_scalar sliding_window attn_logit_softcapping final_logit_softcapping",
        changes=ONE_PLUS,
        more=_gemma2,
        refuse=_gemma2_refuses,
    ),
    "gemma3_text": Family(
        "gemma3",
        "head_dim query_pre_attn_scalar sliding_window final_logit_softcapping rope_local_base_freq",
        scaling="linear",
        changes=ONE_PLUS,
        more=_final_cap,
        refuse=_gemma_refuses,
    ),
    "gpt_neox": Family(
        "gptneox",
        "rotary_pct rotary_emb_base partial_rotary_factor use_parallel_residual hidden_act",
        changes=((r"attn_qkv\.(weight|bias)", qkv_by_kind),),
        more=_neox,
        refuse=_neox_refuses,
        head=True,
    ),
    "minimax": Family(
        "minimax-01",
        "head_dim layer_types num_local_experts num_experts_per_tok full_attn_alpha_factor full_attn_beta_factor "
        "linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor",
        pieces=tuple(
            (rf"^model\.layers\.(\d+)\.self_attn\.{official}\.weight$", ((rf"blk.\1.{name}.weight", None),))
            for official, name in MINIMAX_NAMES
        ),
        changes=((r"attn_output\.weight", _beta()), (r"ffn_down_exps\.weight", _beta("mlp"))),
        more=_minimax,
        refuse=_minimax_refuses,
        names="minimax-m2",
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "head_dim sliding_window num_local_experts num_experts_per_tok",
        released=GPT_OSS_ANGLES,
        pieces=GPT_OSS_PIECES,
        head=True,
    ),
    "jamba": Family(
        "jamba",
        "mamba_d_state mamba_d_conv mamba_dt_rank attn_layer_period attn_layer_offset expert_layer_period "
        "expert_layer_offset num_experts num_experts_per_tok",
        changes=MAMBA,
        more=_no_experts,
        refuse=_hybrid("ssm", "Mamba"),
    ),
    "bamba": Family(
        "granitehybrid",
        "attn_layer_indices attn_rotary_emb partial_rotary_factor attention_bias mlp_bias mamba_n_heads mamba_d_head "
        "mamba_d_state mamba_n_groups mamba_d_conv",
        scaling="",
        pieces=(DT_BIAS,),
        changes=(*INTERLEAVED, *MAMBA2),
        more=_bamba,
        refuse=_hybrid("time_step", "Mamba-2"),
    ),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "falcon_mamba": Family(
        "mamba",
        "state_size conv_kernel expand time_step_rank time_step_scale time_step_init_scheme mixer_rms_eps",
        changes=(*MAMBA, (r"ssm_x\.weight", _before_norms)),
        more=_falcon_mamba,
        refuse=_falcon_mamba_refuses,
    ),
    "falcon_h1": Family(
        "falcon-h1",
        "head_dim mamba_d_ssm mamba_expand mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv "
        "mamba_rms_norm mamba_norm_before_gate mlp_bias embedding_multiplier lm_head_multiplier key_multiplier "
        "attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier ssm_multipliers "
        "mlp_multipliers",
        pieces=(DT_BIAS,),
        changes=FALCON_CHANGES,
        refuse=_falcon_h1_refuses,
        head=True,
    ),
    "granitemoehybrid": _granite,
    "qwen3_next": Family(
        "qwen3next",
        "head_dim partial_rotary_factor layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads num_experts num_experts_per_tok "
        "moe_intermediate_size shared_expert_intermediate_size",
        pieces=(
            (
                r"^.*\.(\d+)\.linear_attn\.in_proj_qkvz\.weight$",
                ((r"blk.\1.attn_qkv.weight", _qkvz(False)), (r"blk.\1.attn_gate.weight", _qkvz(True))),
            ),
            DT_BIAS,
        ),
        changes=(*MAMBA, (r"(?!ssm_).*norm\.weight", one_plus)),
        more=_qwen3_next,
        refuse=_qwen3_next_refuses,
        layout="qwen3_next",
    ),
    "qwen3_5_text": Family(
        "qwen35",
        "head_dim partial_rotary_factor layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads",
        pieces=(DT_BIAS,),
        changes=(*MAMBA, (r"(?!ssm_).*norm\.weight", one_plus), *QWEN35_HEADS),
        more=_qwen3_5,
        refuse=_qwen3_next_refuses,
        layout="qwen3_5",
    ),
    "kimi_linear": Family(
        "kimi-linear",
        "layer_types mlp_layer_types linear_attn_config first_k_dense_replace linear_num_heads linear_head_dim "
        "linear_conv_kernel_dim kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim num_experts "
        "num_experts_per_token moe_intermediate_size num_shared_experts routed_scaling_factor",
        pieces=(LATENT, DT_BIAS, CORRECTION),
        changes=((r"ssm_a", negative_exp), (r"ssm_conv1d_.\.weight", _channels)),
        more=_kimi,
        refuse=_kimi_refuses,
        layout="kimi_linear",
        head=True,
    ),
    "nemotron_h": _nemotron,
    "lfm2": Family(
        "lfm2",
        "layer_types full_attn_idxs conv_L_cache block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier "
        "block_multiple_of",
        changes=((r"shortconv\.conv\.weight", squeezed),),
        more=_lfm2,
        refuse=_hybrid("causal_conv", "a convolution"),
    ),
    "lfm2_moe": Family(
        "lfm2moe",
        "layer_types full_attn_idxs conv_L_cache num_dense_layers num_experts num_experts_per_tok "
        "moe_intermediate_size",
        pieces=((r"\.expert_bias$", ((".expert_bias.bias", None),)),),
        changes=((r"shortconv\.conv\.weight", squeezed),),
        more=_lfm2,
        refuse=_hybrid("causal_conv", "a convolution"),
    ),
}
