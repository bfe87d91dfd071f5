"""Small transformers models with random weights, of each family that `convert --to gguf` writes for llama.cpp."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "rope_theta": 500.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1 + at / 10 for at in range(8)],
    "long_factor": [1.0 + at for at in range(8)],
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MAMBA2 = {"mamba_d_state": 16, "mamba_chunk_size": 8}
GRANITE = {**MAMBA2, "mamba_n_heads": 4, "shared_intermediate_size": 32}
NEMOTRON = {
    "num_hidden_layers": None, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 16, "chunk_size": 8, "time_step_min": 1e-9,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
MIXED = ["conv", "full_attention", "conv", "full_attention"]
NO_CAPS = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}


RWKV6 = """seqblocks: 1
use: [rwkv6]
model:
  input: {tokens: 96}
  steps:
    - embed: {features: 128}
    - layer_norm: {name: pre_norm}
    - repeat:
        name: layers
        times: 3
        steps:
          - residual:
              name: token
              steps:
                - layer_norm: {name: norm}
                - rwkv6_mixer: {dim: 128, heads: 2, expand_k: 1, eps: 64e-5}
          - residual:
              name: channel
              steps: [{layer_norm: {name: norm}}, {rwkv6_channel_mixer: {dim: 128, ratio: 3.5}}]
    - layer_norm: {name: norm}
    - unembed: {bias: false}
"""


class Case(NamedTuple):
    """The name of the class in transformers without its suffix, and entries of its config; None removes one of SIZES.

    gelu: whether llama.cpp rounds activations to float16 (its GELU is a table).
    """

    name: str
    config: dict[str, Any]
    gelu: bool = False


CASES = {
    "llama": Case("Llama", {
        "attention_bias": True, "mlp_bias": True, "head_dim": 32, "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
    }),
    "llama_yarn": Case("Llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama_linear": Case("Llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama_longrope": Case("Llama", {
        "rope_parameters": {**LONG, "factor": 4.0, "original_max_position_embeddings": 256},
        "max_position_embeddings": 1024,
    }),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": Case("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Case("Qwen2", {"rope_parameters": YARN}),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3_moe": Case("Qwen3Moe", {**EXPERTS, "head_dim": 32}),
    "smollm3": Case("SmolLM3", {"rope_parameters": YARN}),
    "olmo2": Case("Olmo2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "phi3": Case("Phi3", {"rope_parameters": ROPE}),
    "phi3_longrope": Case("Phi3", {
        "rope_parameters": LONG, "original_max_position_embeddings": 256, "max_position_embeddings": 1024,
    }),
    "gemma2": Case("Gemma2", NO_CAPS, gelu=True),
    "gemma3_text": Case("Gemma3", {
        **NO_CAPS, "num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }, gelu=True),
    "gpt_neox": Case("GPTNeoX", {
        "num_key_value_heads": None, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "use_parallel_residual": True, "hidden_act": "gelu_pytorch_tanh",
    }, gelu=True),
    "gpt_neox_in_sequence": Case("GPTNeoX", {
        "num_key_value_heads": None, "use_parallel_residual": False, "hidden_act": "gelu",
    }, gelu=True),
    "gpt_oss": Case("GptOss", {
        "head_dim": 32, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN,
    }),
    "jamba": Case("Jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8,
    }),
    "bamba": Case("Bamba", {
        **MAMBA2, "mamba_n_heads": 8, "mamba_n_groups": 2, "attn_layer_indices": [1, 2], "attention_bias": True,
        "rope_parameters": ROPE, "tie_word_embeddings": True,
    }),
    "deepseek_v2": Case("DeepseekV2", {
        **DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 2, "topk_method": "greedy",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    }),
    "deepseek_v3": Case("DeepseekV3", {
        **DEEPSEEK, "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }),
    "minimax": Case("MiniMax", {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "head_dim": 32,
        **{f"{part}_alpha_factor": 1.3 for part in ("full_attn", "linear_attn", "mlp")},
        "full_attn_beta_factor": 0.7, "linear_attn_beta_factor": 1.4, "mlp_beta_factor": 0.8,
    }),
    "falcon_mamba": Case("FalconMamba", {
        "num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": 128, "state_size": 16,
        "time_step_rank": 8, "tie_word_embeddings": False,
    }),
    "falcon_h1": Case("FalconH1", {
        **MAMBA2, "mamba_d_ssm": 96, "mamba_d_head": "auto", "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "lm_head_multiplier": 0.6,
        "embedding_multiplier": 1.7, "key_multiplier": 0.5, "attention_out_multiplier": 1.3,
        "attention_in_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.7, 1.3, 0.4, 1.6, 0.9], "mlp_multipliers": [0.8, 1.4], "mlp_bias": True,
        "tie_word_embeddings": True, "rope_parameters": ROPE,
    }),
    "falcon_h1_without_norm": Case("FalconH1", {
        **MAMBA2, "mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_rms_norm": False, "tie_word_embeddings": False,
    }),
    "granite": Case("GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_groups": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.6, "attention_multiplier": 0.3, "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    }),
    "granite_without_experts": Case("GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0,
        "position_embedding_type": "rope", "attention_bias": True,
    }),
    "granite_attention": Case("GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["attention"] * 4, "num_local_experts": 0, "embedding_multiplier": 3.0,
        "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
        "position_embedding_type": "rope",
    }),
    "granite_attention_experts": Case("GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["attention"] * 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_multiplier": 0.3, "position_embedding_type": "rope",
    }),
    "qwen3_next": Case("Qwen3Next", {
        **EXPERTS, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "shared_expert_intermediate_size": 64,
    }),
    "qwen3_5_text": Case("Qwen3_5", {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,  # normalising shorter keys amplifies the errors of f16
        "rope_parameters": {
            **ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
        },
    }),
    "kimi_linear": Case("KimiLinear", {
        "rms_norm_eps": 1e-6,  # llama.cpp adds it to the sum of squares of a key; transformers adds 1e-6
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "linear_head_dim": 16, "linear_num_heads": 4,
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "norm_topk_prob": True,
    }),
    "nemotron_h": Case("NemotronH", {
        **NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mlp_bias": True,
    }),
    "nemotron_h_experts": Case("NemotronH", {
        **NEMOTRON, "layers_block_type": ["mamba", "attention", "moe", "mamba", "moe"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32, "routed_scaling_factor": 2.5,
    }),
    "lfm2": Case("Lfm2", {"layer_types": MIXED, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": Case("Lfm2Moe", {
        **EXPERTS, "layer_types": MIXED, "num_dense_layers": 1, "use_expert_bias": True,
    }),
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}  # where the name is not that of the model


def built(case: Case, **more: Any) -> Any:
    """Return a transformers model with noise on all weights. more: entries of its config."""
    import transformers

    removed = [key for key, value in case.config.items() if value is None and SIZES.get(key) is not None]
    given = {key: value for key, value in {**SIZES, **case.config, **more}.items() if key not in removed}
    config = copy.deepcopy(given)  # transformers changes mappings inside it
    torch.manual_seed(0)
    made = getattr(transformers, CONFIGS.get(case.name, f"{case.name}Config"))(**config)
    model = getattr(transformers, f"{case.name}ForCausalLM")(made).eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        corrections = [x for name, x in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]
        for tensor in (*model.parameters(), *corrections):
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model
