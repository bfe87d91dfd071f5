"""Small transformers models with random weights that `from_pretrained` must read without a spec."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TYPES = ("linear_attention", "full_attention")


def attention_sizes(chance: random.Random, head: int = 8) -> dict[str, Any]:
    heads = chance.choice((2, 4))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": chance.choice((1, 2)), "hidden_size": heads * head}
    return {**sizes, "intermediate_size": 24, "vocab_size": chance.randint(20, 40), **NO_TOKENS}


def layers(chance: random.Random, depth: int, words: tuple[str, ...] = TYPES) -> list[str]:
    """Return layer types, each at least once."""
    found = [*words, *chance.choices(words, k=depth - len(words))]
    chance.shuffle(found)
    return found


def recurrent_gemma(chance: random.Random) -> dict[str, Any]:
    sizes = attention_sizes(chance, chance.choice((8, 12)))
    return {
        **sizes, "num_hidden_layers": 4, "attention_window_size": chance.choice((3, 7)), "tie_word_embeddings": True,
        "lru_width": sizes["num_attention_heads"] * chance.choice((3, 6)), "conv1d_width": chance.choice((2, 4)),
        "attention_bias": chance.random() < 0.5, "logits_soft_cap": chance.choice((10.0, 30.0)),
        "block_types": chance.choice((["recurrent", "attention"], ["recurrent", "recurrent", "attention"])),
    }  # fmt: skip


def qwen3_next(chance: random.Random) -> dict[str, Any]:
    keys = chance.choice((1, 2))
    return {
        **attention_sizes(chance), "num_hidden_layers": 3, "layer_types": layers(chance, 3), "head_dim": 16,
        "linear_key_head_dim": chance.choice((4, 8)), "linear_value_head_dim": chance.choice((4, 6)),
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * chance.choice((1, 2)),
        "num_experts": chance.choice((3, 4)), "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10, "mlp_only_layers": [chance.randrange(3)],
        "norm_topk_prob": chance.random() < 0.5, "tie_word_embeddings": chance.random() < 0.5,
    }  # fmt: skip


def qwen3_5(chance: random.Random) -> dict[str, Any]:
    without = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
               "mlp_only_layers", "norm_topk_prob")  # fmt: skip
    found = {key: value for key, value in qwen3_next(chance).items() if key not in without}
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": chance.choice((0.25, 0.5)),
            "mrope_section": [1, 1, 0], "mrope_interleaved": True}  # fmt: skip
    return {**found, "rope_parameters": rope}


def olmo_hybrid(chance: random.Random) -> dict[str, Any]:
    heads = chance.choice((1, 2))
    return {
        **attention_sizes(chance), "num_hidden_layers": 3, "layer_types": layers(chance, 3),
        "linear_key_head_dim": chance.choice((5, 8)), "linear_value_head_dim": chance.choice((8, 9)),
        "linear_num_key_heads": heads, "linear_num_value_heads": heads * chance.choice((1, 2)),
        "linear_allow_neg_eigval": chance.random() < 0.5, "attention_bias": chance.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": chance.choice((500.0, None))},
    }  # fmt: skip


def kimi_linear(chance: random.Random) -> dict[str, Any]:
    sizes = attention_sizes(chance)
    return {
        **sizes, "num_key_value_heads": sizes["num_attention_heads"], "num_hidden_layers": 3,
        "layer_types": layers(chance, 3), "mlp_layer_types": layers(chance, 3, ("dense", "sparse")),
        "linear_head_dim": chance.choice((4, 8)), "linear_num_heads": chance.choice((1, 2)),
        "kv_lora_rank": 6, "q_lora_rank": chance.choice((None, 5)), "qk_rope_head_dim": chance.choice((2, 4)),
        "qk_nope_head_dim": 8, "v_head_dim": chance.choice((6, 8)), "num_local_experts": 4,
        "num_experts_per_tok": chance.choice((1, 2)), "moe_intermediate_size": 6,
        "n_shared_experts": chance.choice((1, 2)), "norm_topk_prob": chance.random() < 0.5,
        "attention_bias": chance.random() < 0.5,
    }  # fmt: skip


def jamba(chance: random.Random) -> dict[str, Any]:
    period = chance.choice((2, 3))
    return {
        **attention_sizes(chance), "num_hidden_layers": 3, "num_experts": chance.choice((1, 3)),
        "attn_layer_period": period, "attn_layer_offset": chance.randrange(period), "expert_layer_offset": 1,
        "num_experts_per_tok": chance.choice((1, 2)), "mamba_d_state": 4, "mamba_dt_rank": chance.choice(("auto", 3)),
        "mamba_conv_bias": chance.random() < 0.5, "mamba_proj_bias": chance.random() < 0.5, "mamba_d_conv": 3,
    }  # fmt: skip


def bamba(chance: random.Random) -> dict[str, Any]:
    return {
        **attention_sizes(chance), "num_hidden_layers": 3, "attn_layer_indices": [chance.randrange(3)],
        "mamba_n_heads": 4, "mamba_n_groups": chance.choice((1, 2)), "mamba_d_state": chance.choice((4, 6)),
        "mamba_conv_bias": chance.random() < 0.5, "mamba_proj_bias": chance.random() < 0.5, "mamba_chunk_size": 8,
        "attention_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5,
        "time_step_limit": chance.choice(((0.0, float("inf")), (0.3, 0.6))),
    }  # fmt: skip


def granitemoehybrid(chance: random.Random) -> dict[str, Any]:
    rope = {**chance.choice(SCALED), "rope_theta": 500.0}
    return {
        **{key: value for key, value in bamba(chance).items() if key not in ("attn_layer_indices", "mlp_bias")},
        "layer_types": layers(chance, 3), "num_local_experts": chance.choice((0, 3)), "num_experts_per_tok": 2,
        "shared_intermediate_size": 10, "embedding_multiplier": chance.choice((1.0, 3.0)), "logits_scaling": 2.0,
        "residual_multiplier": chance.choice((1, 0.6)), "attention_multiplier": chance.choice((1.0, 0.3)),
        "position_embedding_type": chance.choice(("rope", "nope", None)), "rope_parameters": rope,
        "tie_word_embeddings": chance.random() < 0.5, "max_position_embeddings": 64,
    }  # fmt: skip


def falcon_h1(chance: random.Random) -> dict[str, Any]:
    given = bamba(chance)
    names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    for key in ("attn_layer_indices", "num_hidden_layers"):
        del given[key]
    return {
        **given, "num_hidden_layers": 2, "mamba_d_ssm": chance.choice((None, 24)), "mamba_d_head": "auto",
        **{f"{name}_multiplier": chance.choice((1.0, 0.6, 1.7)) for name in names},
        "ssm_multipliers": chance.choice((None, [0.7, 1.3, 0.4, 1.6, 0.9], [1.5, 1.0, 1.0, 1.0, 1.0])),
        "mlp_multipliers": chance.choice((None, [0.8, 1.4], [1.0, 0.3])), "projectors_bias": chance.random() < 0.5,
        "mamba_rms_norm": chance.random() < 0.6, "mamba_norm_before_gate": chance.random() < 0.5,
        "rope_parameters": {**chance.choice(SCALED), "rope_theta": 500.0}, "max_position_embeddings": 64,
        "tie_word_embeddings": chance.random() < 0.5,
    }  # fmt: skip


def nemotron_h(chance: random.Random) -> dict[str, Any]:
    kinds = ("linear_attention", "full_attention", "mlp", "moe")
    groups = chance.choice((1, 2))
    return {
        **attention_sizes(chance), "layers_block_type": layers(chance, 5, kinds), "head_dim": chance.choice((6, 8)),
        "mamba_num_heads": 4, "mamba_head_dim": chance.choice((4, 6)), "n_groups": chance.choice((1, 2)),
        "ssm_state_size": 4, "chunk_size": 8, "conv_kernel": chance.choice((2, 4)), "use_bias": chance.random() < 0.5,
        "use_conv_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 6, "moe_shared_expert_intermediate_size": 10,
        "moe_latent_size": chance.choice((None, 6)), "n_group": groups, "topk_group": 1,
        "norm_topk_prob": chance.random() < 0.6, "routed_scaling_factor": chance.choice((1.0, 2.5)),
        "time_step_min": chance.choice((0.001, 0.3)),
        "tie_word_embeddings": chance.random() < 0.5,
    }  # fmt: skip


def zamba(chance: random.Random) -> dict[str, Any]:
    kinds = ["hybrid", *layers(chance, 4, (TYPES[0], "hybrid"))]
    chance.shuffle(kinds)
    return {
        **attention_sizes(chance), "num_hidden_layers": 5, "layers_block_type": kinds, "mamba_d_state": 4,
        "n_mamba_heads": chance.choice((1, 2, 4)), "mamba_dt_rank": chance.choice(("auto", 3)),
        "attention_head_dim": chance.choice((None, 6)), "mamba_conv_bias": chance.random() < 0.5,
        "mamba_proj_bias": chance.random() < 0.5, "mamba_d_conv": chance.choice((2, 4)),
    }  # fmt: skip


def zamba2(chance: random.Random) -> dict[str, Any]:
    sizes, adapted = attention_sizes(chance), chance.random() < 0.5
    return {
        **sizes, "num_hidden_layers": 5, "layers_block_type": ["hybrid", *layers(chance, 4, (TYPES[0], "hybrid"))],
        "num_key_value_heads": sizes["num_attention_heads"], "mamba_d_state": 4, "n_mamba_heads": 4,
        "num_mem_blocks": chance.choice((1, 2)), "adapter_rank": 3, "use_shared_attention_adapter": adapted,
        "use_mem_rope": chance.random() < 0.5, "mamba_ngroups": chance.choice((1, 2)), "chunk_size": 8,
        "add_bias_linear": chance.random() < 0.5, "time_step_min": chance.choice((0.001, 0.3)),
    }  # fmt: skip


SCALED: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "mscale": 1.0,
     "mscale_all_dim": 0.5},
)  # fmt: skip


def dense(chance: random.Random, base: float = 500.0) -> dict[str, Any]:
    rope = {**chance.choice(SCALED), "rope_theta": base}
    sizes = {**attention_sizes(chance), "num_hidden_layers": chance.choice((2, 3)), "rope_parameters": rope}
    return {**sizes, "max_position_embeddings": 64, "tie_word_embeddings": chance.random() < 0.5}


def llama(chance: random.Random) -> dict[str, Any]:
    biases = {"attention_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5}
    return {**dense(chance), **biases, "head_dim": chance.choice((None, 6, 16))}


def mistral(chance: random.Random) -> dict[str, Any]:
    return {**dense(chance), "sliding_window": chance.choice((None, 3, 40)), "head_dim": chance.choice((None, 16))}


def qwen2(chance: random.Random) -> dict[str, Any]:
    window = {"use_sliding_window": chance.random() < 0.7, "sliding_window": 4, "max_window_layers": 1}
    return {**dense(chance), **window}


def qwen3(chance: random.Random) -> dict[str, Any]:
    return {**qwen2(chance), "head_dim": chance.choice((6, 16)), "attention_bias": chance.random() < 0.5}


def smollm3(chance: random.Random) -> dict[str, Any]:
    turned = chance.choice((None, [1, 0, 1]))
    interval = {"no_rope_layers": turned, "no_rope_layer_interval": 2, "num_hidden_layers": 3}
    return {**dense(chance), **interval, "attention_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5}


def olmo2(chance: random.Random) -> dict[str, Any]:
    return {**dense(chance), "attention_bias": chance.random() < 0.5}


def phi3(chance: random.Random) -> dict[str, Any]:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    found = {**dense(chance), **rope, "sliding_window": chance.choice((None, 4))}
    if chance.random() < 0.5:
        rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0]}  # fmt: skip
        found |= {"rope_parameters": rope, "original_max_position_embeddings": 48, "max_position_embeddings": 96}
    return found


def gemma2(chance: random.Random) -> dict[str, Any]:
    caps = {"final_logit_softcapping": chance.choice((None, 5.0)), "attn_logit_softcapping": chance.choice((None, 3.0))}
    return {
        **dense(chance), **caps, "head_dim": chance.choice((6, 16)), "query_pre_attn_scalar": chance.choice((8, 12)),
        "sliding_window": chance.choice((3, 7)), "tie_word_embeddings": True, "num_hidden_layers": 3,
    }  # fmt: skip


def gemma3(chance: random.Random) -> dict[str, Any]:
    rope = {
        "full_attention": {**chance.choice(SCALED[:2]), "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    return {**gemma2(chance), "attn_logit_softcapping": None, "rope_parameters": rope,
            "layer_types": layers(chance, 3, ("full_attention", "sliding_attention"))}  # fmt: skip


def mixtral(chance: random.Random) -> dict[str, Any]:
    experts = {"num_local_experts": 3, "num_experts_per_tok": chance.choice((1, 2)) + 1}
    return {**dense(chance), **experts, "sliding_window": chance.choice((None, 4)), "head_dim": chance.choice((6, 16))}


def qwen3_moe(chance: random.Random) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "num_hidden_layers": 3}
    layers_ = {"mlp_only_layers": chance.choice(([], [1])), "norm_topk_prob": chance.random() < 0.5}
    return {**dense(chance), **experts, **layers_, "head_dim": 16, "attention_bias": chance.random() < 0.5}


def lfm2(chance: random.Random) -> dict[str, Any]:
    kinds = layers(chance, 3, ("conv", "full_attention"))
    sizes = {"conv_bias": chance.random() < 0.5, "conv_L_cache": chance.choice((2, 3)), "layer_types": kinds}
    adjusted = {"block_auto_adjust_ff_dim": chance.random() < 0.5, "block_multiple_of": 8}
    return {**dense(chance), **sizes, **adjusted, "num_hidden_layers": 3}


def lfm2_moe(chance: random.Random) -> dict[str, Any]:
    kinds = layers(chance, 3, ("conv", "full_attention"))
    experts = {"num_experts": 4, "num_experts_per_tok": chance.choice((2, 3)), "moe_intermediate_size": 6}
    return {
        **dense(chance), **experts, "num_hidden_layers": 3, "layer_types": kinds, "conv_L_cache": chance.choice((2, 3)),
        "conv_bias": chance.random() < 0.5, "num_dense_layers": chance.choice((0, 1)),
        "use_expert_bias": chance.random() < 0.6, "routed_scaling_factor": chance.choice((1.0, 1.5)),
        "norm_topk_prob": chance.random() < 0.6,
    }  # fmt: skip


def gpt_neox(chance: random.Random) -> dict[str, Any]:
    found = dense(chance)
    found["rope_parameters"]["partial_rotary_factor"] = chance.choice((0.25, 0.5, 1.0))
    del found["num_key_value_heads"]
    return {
        **found, "use_parallel_residual": chance.random() < 0.5, "attention_bias": chance.random() < 0.5,
        "hidden_act": chance.choice(("gelu", "gelu_pytorch_tanh")),
    }  # fmt: skip


def minimax(chance: random.Random) -> dict[str, Any]:
    factors = ("full_attn_alpha", "full_attn_beta", "linear_attn_alpha", "linear_attn_beta", "mlp_alpha", "mlp_beta")
    return {
        **dense(chance), "num_hidden_layers": 3, "layer_types": layers(chance, 3), "num_local_experts": 3,
        "num_experts_per_tok": 2, "head_dim": chance.choice((6, 8, 16)), "block_size": chance.choice((4, 256)),
        "sliding_window": chance.choice((None, 4)),
        **{f"{name}_factor": chance.choice((1, 0.6, 3.5)) for name in factors},
    }  # fmt: skip


def rwkv(chance: random.Random) -> dict[str, Any]:
    return {
        "hidden_size": 12, "num_hidden_layers": chance.choice((2, 3, 4)), "vocab_size": chance.randint(20, 40),
        "attention_hidden_size": chance.choice((None, 8)), "intermediate_size": chance.choice((None, 20)),
        "rescale_every": chance.choice((0, 1, 2, 6)), "layer_norm_epsilon": chance.choice((1e-5, 1e-3)),
        "tie_word_embeddings": chance.random() < 0.5, **NO_TOKENS,
    }  # fmt: skip


def gpt_oss(chance: random.Random) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16}  # fmt: skip
    return {
        **dense(chance), "rope_parameters": chance.choice((rope, dense(chance)["rope_parameters"])),
        "head_dim": chance.choice((6, 16)), "num_local_experts": 4, "num_experts_per_tok": chance.choice((2, 3)),
        "attention_bias": chance.random() < 0.6, "sliding_window": chance.choice((3, 7)), "num_hidden_layers": 3,
        "layer_types": layers(chance, 3, ("full_attention", "sliding_attention")),
        "swiglu_limit": chance.choice((7.0, 0.5)), "swiglu_alpha": chance.choice((1.702, 1.0)),
    }  # fmt: skip


def deepseek(chance: random.Random) -> dict[str, Any]:
    found = dense(chance)
    heads = found["num_attention_heads"]
    if found["rope_parameters"]["rope_type"] == "llama3":
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    return {
        **found, "num_key_value_heads": heads, "num_hidden_layers": 3, "q_lora_rank": chance.choice((None, 5)),
        "kv_lora_rank": 6, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": chance.choice((6, 9)),
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": chance.choice((1.0, 2.5)),
        "attention_bias": chance.random() < 0.5,
    }  # fmt: skip


def deepseek_v2(chance: random.Random) -> dict[str, Any]:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    return {**deepseek(chance), **(grouped if chance.random() < 0.5 else {"topk_method": "greedy"})}


def deepseek_v3(chance: random.Random) -> dict[str, Any]:
    return {**deepseek(chance), "n_group": 2, "topk_group": chance.choice((1, 2)),
            "norm_topk_prob": chance.random() < 0.5}  # fmt: skip


# The transformers class, its configurations, and the layout that it writes.
DRAWN: dict[str, tuple[str, Callable[[random.Random], dict[str, Any]], str]] = {
    "recurrent_gemma": ("RecurrentGemma", recurrent_gemma, "official"),
    "qwen3_next": ("Qwen3Next", qwen3_next, "qwen3_next"),
    "qwen3_5_text": ("Qwen3_5", qwen3_5, "qwen3_5"),
    "olmo_hybrid": ("OlmoHybrid", olmo_hybrid, "transformers"),
    "kimi_linear": ("KimiLinear", kimi_linear, "transformers"),
    "jamba": ("Jamba", jamba, "official"),
    "bamba": ("Bamba", bamba, "official"),
    "granitemoehybrid": ("GraniteMoeHybrid", granitemoehybrid, "official"),
    "falcon_h1": ("FalconH1", falcon_h1, "official"),
    "nemotron_h": ("NemotronH", nemotron_h, "official"),
    "zamba": ("Zamba", zamba, "official"),
    "zamba2": ("Zamba2", zamba2, "official"),
    "llama": ("Llama", llama, "official"),
    "mistral": ("Mistral", mistral, "official"),
    "qwen2": ("Qwen2", qwen2, "official"),
    "qwen3": ("Qwen3", qwen3, "official"),
    "smollm3": ("SmolLM3", smollm3, "official"),
    "olmo2": ("Olmo2", olmo2, "official"),
    "phi3": ("Phi3", phi3, "official"),
    "gemma2": ("Gemma2", gemma2, "official"),
    "gemma3_text": ("Gemma3", gemma3, "official"),
    "mixtral": ("Mixtral", mixtral, "official"),
    "qwen3_moe": ("Qwen3Moe", qwen3_moe, "official"),
    "lfm2": ("Lfm2", lfm2, "official"),
    "lfm2_moe": ("Lfm2Moe", lfm2_moe, "official"),
    "deepseek_v2": ("DeepseekV2", deepseek_v2, "official"),
    "deepseek_v3": ("DeepseekV3", deepseek_v3, "official"),
    "gpt_neox": ("GPTNeoX", gpt_neox, "official"),
    "minimax": ("MiniMax", minimax, "official"),
    "rwkv": ("Rwkv", rwkv, "official"),
    "gpt_oss": ("GptOss", gpt_oss, "official"),
}


CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}  # where the name is not that of the model


def peer(family: str, seed: int, dtype: torch.dtype, **more: Any) -> Any:
    """Return a transformers model, with noise on all weights and corrections. more: entries of its config."""
    library = pytest.importorskip("transformers", reason="needs the extra `hub`")
    name, drawn, _ = DRAWN[family]
    torch.manual_seed(seed)
    config = getattr(library, CONFIGS.get(name, f"{name}Config"))(**{**drawn(random.Random(seed)), **more})
    return with_noise(getattr(library, f"{name}ForCausalLM")(config)).to(dtype).eval()


def with_noise(model: Any) -> Any:
    """Return a transformers model after adding noise to all weights and corrections."""
    model.config._experts_implementation = "eager"  # the default implementation does not support float64
    with torch.no_grad():
        corrections = [b for name, b in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]
        for tensor in (*model.parameters(), *corrections):
            tensor.add_(0.2 * torch.randn_like(tensor))
    return model


class InFloat64:
    """Replace torch in a module that computes parts in float32 for any dtype, for a comparison to 1e-9."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_float64(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Make a transformers model compute everything in float64, its rotary frequencies included."""
    module = sys.modules[type(model).__module__]
    patch.setattr(module, "torch", InFloat64())
    patch.setattr(Tensor, "float", Tensor.double)
    if hasattr(module, "RecurrentGemmaRglru"):
        patch.setattr(module.RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))
    _fixed_decays_in_float64(model)
    rope = sys.modules["transformers.modeling_rope_utils"]
    patch.setattr(rope, "torch", InFloat64())
    for part in model.modules():
        for kind in [""] * hasattr(part, "inv_freq") + list(getattr(part, "layer_types", ())):
            given = model.config.rope_parameters[kind] if kind else model.config.rope_parameters
            named = {"layer_type": kind} if kind else {}
            prefix = f"{kind}_" if kind else ""
            if given.get("rope_type", "default") == "default":
                count = getattr(part, f"{prefix}inv_freq").numel()
                rates = given["rope_theta"] ** (-torch.arange(count, dtype=torch.float64) / count)
            else:
                rates, _ = rope.ROPE_INIT_FUNCTIONS[given["rope_type"]](model.config, "cpu", **named)
            setattr(part, f"{prefix}inv_freq", rates)
            setattr(part, f"{prefix}original_inv_freq", rates)


def _fixed_decays_in_float64(model: Any) -> None:
    """Compute buffers of lightning attention anew."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for part in model.modules():
            if hasattr(part, "slope_rate"):
                part.slope_rate = part.get_slope_rate()
                part.query_decay, part.key_decay, part.diagonal_decay = part.decay_factors(part.slope_rate)
    finally:
        torch.set_default_dtype(usual)
