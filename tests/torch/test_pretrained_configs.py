"""Specs that `from_pretrained` generates from the config.json of published models."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.checkpoint import families
from tests.sampled import sampled

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra `hub`")


MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11, "time_step_rank": 3}
OFFICIAL = {
    "d_model": 16, "n_layer": 2, "vocab_size": 11, "rms_norm": True, "ssm_cfg": {"dt_rank": 3, "layer": "Mamba1"}
}  # fmt: skip
XLSTM = {
    "model_type": "xlstm", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11, "num_heads": 2,
    "ffn_round_up_to_multiple_of": 8
}  # fmt: skip
FALCON = {**MAMBA, "model_type": "falcon_mamba"}
MAMBA2 = {**MAMBA, "model_type": "mamba2", "num_heads": 4, "head_dim": 8, "n_groups": 2}
ATTENTION = {**MAMBA, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
GRIFFIN = {**ATTENTION, "model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}
QWEN = {
    **ATTENTION, "model_type": "qwen3_next", "head_dim": 16, "linear_key_head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2, "full_attention_interval": 2,
}  # fmt: skip
QWEN35 = {
    **{key: value for key, value in QWEN.items() if not key.startswith("num_experts")}, "model_type": "qwen3_5_text",
}  # fmt: skip
OLMO = {**ATTENTION, "model_type": "olmo_hybrid"}
KIMI = {
    **ATTENTION, "model_type": "kimi_linear", "num_experts": 3, "num_experts_per_token": 2, "moe_intermediate_size": 8,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 8, "num_heads": 2},
}  # fmt: skip
JAMBA = {**ATTENTION, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 3}
BAMBA = {**ATTENTION, "model_type": "bamba", "mamba_n_heads": 4, "attn_layer_indices": [0]}
GRANITE = {
    **ATTENTION, "model_type": "granitemoehybrid", "mamba_n_heads": 4, "num_local_experts": 3,
    "layer_types": ["mamba", "attention"], "shared_intermediate_size": 8, "position_embedding_type": "nope",
    "attention_multiplier": 0.3, "embedding_multiplier": 3, "residual_multiplier": 0.2, "logits_scaling": 4,
}  # fmt: skip
FALCON_H1 = {
    **ATTENTION, "model_type": "falcon_h1", "mamba_n_heads": 4, "mamba_d_ssm": 24, "mamba_d_state": 4,
    "ssm_multipliers": [0.5, 1.0, 2.0, 1.0, 1.5], "mlp_multipliers": [0.5, 2.0], "key_multiplier": 0.5,
}  # fmt: skip
NEMOTRON = {
    **{key: value for key, value in ATTENTION.items() if key not in ("num_hidden_layers", "time_step_rank")},
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "mamba_num_heads": 4, "mamba_head_dim": 8,
    "head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "n_routed_experts": 4, "moe_intermediate_size": 6,
    "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 6,
}  # fmt: skip
ZAMBA = {
    **ATTENTION, "model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 2,
    "n_mamba_heads": 4,
}  # fmt: skip
FIRST_ZAMBA = {**ATTENTION, "model_type": "zamba", "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4}
FIRST_ZAMBA = {key: value for key, value in FIRST_ZAMBA.items() if key != "time_step_rank"}
RWKV = {key: value for key, value in MAMBA.items() if key != "time_step_rank"}
RWKV |= {"model_type": "rwkv", "rescale_every": 1, "attention_hidden_size": 8}
DENSE = [{**ATTENTION, "model_type": kind} for kind in ("llama", "mistral", "qwen2", "olmo2", "smollm3", "phi3")]
DENSE += [{**ATTENTION, "model_type": kind, "head_dim": 16} for kind in ("qwen3", "gemma2", "gemma3_text")]
LLAMA, GEMMA3 = DENSE[0], DENSE[8]
DENSE += [
    {**ATTENTION, "model_type": "mixtral", "num_local_experts": 3},
    {**ATTENTION, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2,
     "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    {**ATTENTION, "model_type": "lfm2", "full_attn_idxs": [1]},
    {**ATTENTION, "model_type": "lfm2_moe", "full_attn_idxs": [1], "num_experts": 4, "num_dense_layers": 1,
     "moe_intermediate_size": 8},
    *({**ATTENTION, "model_type": kind, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4, "n_group": 2,
       "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
       "moe_intermediate_size": 6, "first_k_dense_replace": 1} for kind in ("deepseek_v2", "deepseek_v3")),
    {**{key: value for key, value in ATTENTION.items() if key != "num_key_value_heads"}, "model_type": "gpt_neox",
     "rotary_pct": 0.5},
    {**ATTENTION, "model_type": "minimax", "num_local_experts": 3, "mlp_alpha_factor": 3.5},
    {**ATTENTION, "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8},
]  # fmt: skip
DECODERS = {config["model_type"]: config for config in DENSE}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
DENSE += [
    {**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
    {**DENSE[5], "rope_parameters": LONG, "original_max_position_embeddings": 64},
]
GLA = {**MAMBA, "model_type": "gla", "num_heads": 2}
KINDS = ("gla", "retnet", "delta_net", "gated_deltanet", "kda", "linear_attn", "gated_deltaproduct")
FLA = [{**GLA, "model_type": kind} for kind in KINDS]
FLA += [{**GLA, "model_type": "hgrn2", "expand_ratio": 8}, {**GLA, "model_type": "rwkv7", "head_dim": 8}]


HUB = (
    "mamba", "mamba2", "falcon_mamba", "xlstm", "recurrent_gemma", "qwen3_next", "olmo_hybrid", "kimi_linear", "jamba",
    "bamba", "zamba2", "lfm2_moe", "granitemoehybrid", "falcon_h1",
    "nemotron_h", "qwen3_5_text", "gpt_oss", "zamba", "minimax", "rwkv",
)  # fmt: skip
CONFIGS = [
    MAMBA, OFFICIAL, MAMBA2, XLSTM, FALCON, GRIFFIN, QWEN, QWEN35, OLMO, KIMI, JAMBA, BAMBA, FIRST_ZAMBA, ZAMBA,
    GRANITE, FALCON_H1, NEMOTRON, RWKV, *DENSE, *FLA,
]  # fmt: skip
ODD = (0, -1, 10**7, 10**400, 2.5, float("nan"), float("inf"), "x", None, [], [3], {}, {"a": 1}, True)
MORE = {  # optional entries of a config
    "rope_parameters", "layer_types", "mlp_layer_types", "mlp_only_layers", "num_kv_heads", "head_dim", "num_v_heads",
    "expert_layer_period", "decoder_sparse_step", "time_step_limit", "value_dim", "linear_num_key_heads",
    "hidden_ratio", "num_mem_blocks", "mamba_expand", "linear_attn_config", "expand", "initializer_range",
    "time_step_min", "time_step_floor", "time_step_scale", "rescale_prenorm_residual", "w_init_variance_scale",
    "linear_a_log_max", "linear_dt_min", "rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers",
    "no_rope_layers", "no_rope_layer_interval", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "rope_local_base_freq", "rope_theta", "partial_rotary_factor", "mlp_bias",
    "num_local_experts", "moe_intermediate_size", "q_lora_rank", "n_group", "topk_group", "routed_scaling_factor",
    "n_mamba_heads", "mamba_dt_rank", "attention_head_dim", "conv_L_cache", "block_ff_dim", "block_ffn_dim_multiplier",
    "swiglu_limit", "swiglu_alpha", "intermediate_size", "mlp_beta_factor", "router_jitter_noise",
    "block_multiple_of", "full_attn_idxs", "use_parallel_residual", "rotary_pct", "rotary_emb_base", "norm_topk_prob",
    "mamba_d_ssm", "mamba_rms_norm", "attention_in_multiplier", "ssm_multipliers", "mlp_multipliers", "key_multiplier",
    "layers_block_type", "hybrid_override_pattern", "moe_latent_size", "mamba_head_dim", "n_groups",
    "num_dense_layers", "use_expert_bias", "attention_multiplier", "position_embedding_type", "logits_scaling",
    "max_position_embeddings", "original_max_position_embeddings", "sliding_window_pattern",
}  # fmt: skip


@pytest.mark.parametrize(
    "config", sampled(CONFIGS, every=6, ci=1), ids=lambda config: config.get("model_type", "mamba_ssm")
)
def test_no_config_ends_in_a_traceback(config: dict[str, Any]) -> None:
    for key in {*config, *MORE}:
        for value in ODD:
            with contextlib.suppress(seqblocks.UsageError):
                assert families.spec_text({**config, key: value}).startswith("seqblocks: 1")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.get("model_type", "mamba_ssm"))
def test_a_spec_from_a_config_is_complete(config: dict[str, Any]) -> None:
    text = families.spec_text(config)
    model = seqblocks.build_text(text)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 16 if config is OFFICIAL else 11), "padded in the release"


@pytest.mark.parametrize("kind", ["jamba", "bamba", "nemotron_h"])
def test_absent_heads_of_keys_are_eight_and_null_is_all(kind: str) -> None:
    """As in the configs of transformers 5."""
    config = next(each for each in CONFIGS if each.get("model_type") == kind) | {"num_attention_heads": 16}
    sizes = {"hidden_size": 64, "head_dim": 4, "attention_head_dim": 4, "attn_rotary_emb": 2}
    config |= {key: size for key, size in sizes.items() if key in config}
    del config["num_key_value_heads"]
    assert "heads: 16, kv_heads: 8" in families.spec_text(config)
    assert "heads: 16, kv_heads: 16" in families.spec_text({**config, "num_key_value_heads": None})


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_recurrent_gemma_may_have_one_kind_of_layer(kind: str) -> None:
    model = seqblocks.build_text(families.spec_text({**GRIFFIN, "block_types": [kind]}), device="meta")
    names = {name.split(".")[5] for name, _ in model.named_parameters() if "mixer" in name}
    assert names == {"griffin_mixer" if kind == "recurrent" else "attention_mixer"}


def test_the_blocks_of_an_xlstm_are_those_of_num_blocks() -> None:
    """transformers reads num_hidden_layers only where num_blocks is null; its default is 32."""
    for depths, count in (({"num_blocks": 3}, 3), ({"num_blocks": None}, 2), ({}, 2)):
        model = seqblocks.build_text(families.spec_text({**XLSTM, **depths}), device="meta")
        assert len(model.blocks) == count


def test_official_configs_have_the_size_of_the_releases() -> None:
    """mamba-130m and mamba2-130m pad their vocabularies to multiples of 8 and 16; this test uses a smaller state space.
    """
    config = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "rms_norm": True}
    second = {**config, "pad_vocab_size_multiple": 16, "ssm_cfg": {"layer": "Mamba2"}}
    small = {**second, "n_layer": 1, "ssm_cfg": {"layer": "Mamba2", "d_ssm": 768, "rmsnorm": False, "D_has_hdim": True}}
    layer = 768 * (2 * 768 + 2 * 768 + 2 * 128 + 12) + 5 * (768 + 256) + 2 * 12 + 768 + 1536 * 768 + 768
    for some, count in ((config, 129_135_360), (second, 128_989_632), (small, 50288 * 768 + layer + 768)):
        model = seqblocks.build_text(families.spec_text(some), device="meta")
        assert sum(parameter.numel() for parameter in model.parameters()) == count


IN_GRANITE = {  # common entries of two releases
    "num_key_value_heads": 4, "shared_intermediate_size": 1024, "mamba_d_state": 128, "mamba_d_head": 64,
    "layer_types": ["attention" if at in (5, 15, 25, 35) else "mamba" for at in range(40)], "tie_word_embeddings": True,
}  # fmt: skip
IN_NEMOTRON = {"head_dim": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
RELEASES = {  # what differs from the defaults of the family's config, and the parameters of the release
    "Llama-2-7b": ("llama", (32000, 4096, 11008, 32, 32), {}, 6_738_415_616),
    "Llama-3.2-1B": (
        "llama", (128256, 2048, 8192, 16, 32),
        {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                          "original_max_position_embeddings": 8192}}, 1_235_814_400,
    ),
    "Mistral-7B-v0.1": ("mistral", (32000, 4096, 14336, 32, 32), {"num_key_value_heads": 8}, 7_241_732_096),
    "Qwen2.5-0.5B": (
        "qwen2", (151936, 896, 4864, 24, 14), {"num_key_value_heads": 2, "tie_word_embeddings": True}, 494_032_768,
    ),
    "Qwen3-0.6B": (
        "qwen3", (151936, 1024, 3072, 28, 16),
        {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}, 596_049_920,
    ),
    "SmolLM3-3B": ("smollm3", (128256, 2048, 11008, 36, 16), {"num_key_value_heads": 4}, 3_075_098_624),
    "OLMo-2-0425-1B": ("olmo2", (100352, 2048, 8192, 16, 16), {}, 1_484_916_736),
    "OLMo-2-1124-7B": ("olmo2", (100352, 4096, 11008, 32, 32), {}, 7_298_617_344),
    "Phi-3-mini-4k": ("phi3", (32064, 3072, 8192, 32, 32), {"sliding_window": 2047}, 3_821_079_552),
    "gemma-2-2b": ("gemma2", (256000, 2304, 9216, 26, 8), {}, 2_614_341_888),
    "gemma-3-1b": (
        "gemma3_text", (262144, 1152, 6912, 26, 4),
        {"num_key_value_heads": 1, "sliding_window": 512, "rope_theta": 1000000, "rope_local_base_freq": 10000},
        999_885_952,
    ),
    "Mixtral-8x7B": ("mixtral", (32000, 4096, 14336, 32, 32), {"num_key_value_heads": 8}, 46_702_792_704),
    "Qwen3-30B-A3B": (
        "qwen3_moe", (151936, 2048, 6144, 48, 32), {"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
        30_532_122_624,
    ),
    "LFM2-350M": (
        "lfm2", (65536, 1024, 6656, 16, 16), {"num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        354_483_968,
    ),
    "LFM2-8B-A1B": (  # with the corrections of 22 routers to 32 experts
        "lfm2_moe", (65536, 2048, 7168, 24, 32),
        {"layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)]},
        8_339_929_856 + 22 * 32,
    ),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid", (100352, 1536, 512, 40, 12),
        {**IN_GRANITE, "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48}, 6_939_037_248,
    ),
    "Granite-4.0-H-Micro": (
        "granitemoehybrid", (100352, 2048, 8192, 40, 32),
        {**IN_GRANITE, "num_key_value_heads": 8, "num_local_experts": 0, "shared_intermediate_size": 8192,
         "mamba_n_heads": 64}, 3_191_396_096,
    ),
    "Falcon-H1-0.5B": (
        "falcon_h1", (32784, 1024, 2048, 36, 8),
        {"num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
         "mamba_d_state": 128, "mlp_multipliers": [0.8838834764831844, 0.5859375], "mamba_use_mlp": True,
         "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
         "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "rope_theta": 1e11}, 521_411_104,
    ),
    "Nemotron-H-8B": (
        "nemotron_h", (131072, 4096, 21504, 52, 32),
        {**IN_NEMOTRON, "num_key_value_heads": 8, "mamba_num_heads": 128,
         "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}, 8_100_852_736,
    ),
    "Nemotron-3-Nano-30B-A3B": (  # with the corrections of 23 routers to 128 experts
        "nemotron_h", (131072, 2688, 1856, 52, 32),
        {**IN_NEMOTRON, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        31_577_937_344 + 23 * 128,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2", (102400, 2048, 10944, 27, 16),
        {"q_lora_rank": None, "moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
         "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707,
                          "mscale_all_dim": 0.707}}, 15_706_484_224,
    ),
    "DeepSeek-V3": ("deepseek_v3", (129280, 7168, 18432, 61, 128), {}, 671_026_419_200),
    "gpt-oss-20b": ("gpt_oss", (201088, 2880, 2880, 24, 64), {"num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120b": (
        "gpt_oss", (201088, 2880, 2880, 36, 64),
        {"num_local_experts": 128, "experts_per_token": 4, "initial_context_length": 4096, "rope_theta": 150000,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 4096}}, 116_829_156_672,
    ),
    "Qwen3.5 with the default config of transformers": (
        "qwen3_5_text", (248320, 4096, 12288, 32, 16), {"num_key_value_heads": 4}, 8_953_803_264,
    ),
    "Zamba-7B": ("zamba", (32000, 3712, 14848, 76, 16), {"n_mamba_heads": 2}, 7_232_490_496),
    "MiniMax-Text-01": (
        "minimax", (200064, 6144, 9216, 80, 64),
        {"head_dim": 128, "num_local_experts": 32,
         "layer_types": ["linear_attention" if (at + 1) % 8 else "full_attention" for at in range(80)]},
        456_089_655_296,
    ),
    "rwkv-4-169m-pile": ("rwkv", (50277, 768, 3072, 12), {}, 169_342_464),
    "rwkv-4-7b-pile": ("rwkv", (50277, 4096, 16384, 32), {}, 7_392_649_216),
    "pythia-70m": ("gpt_neox", (50304, 512, 2048, 6, 8), {"rotary_pct": 0.25}, 70_426_624),
}  # fmt: skip
COMPOSITES = {  # the language models of releases that also read images: entries of text_config, and its parameters
    "gemma-3-4b": ("gemma3", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                              "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
                   3_880_263_168),
}  # fmt: skip
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(RELEASES))
def test_decoders_have_the_size_of_the_releases(name: str) -> None:
    kind, sizes, more, count = RELEASES[name]
    config = {"model_type": kind, **dict(zip(SIZES, sizes, strict=False)), **more}
    _, model = seqblocks.load_text(families.spec_text(config))
    assert model is not None
    assert seqblocks.summarise(model).params == count


@pytest.mark.parametrize("name", COMPOSITES)
def test_language_models_of_releases_that_read_images_have_their_size(name: str) -> None:
    kind, entries, count = COMPOSITES[name]
    _, model = seqblocks.load_text(families.spec_text({"model_type": kind, "text_config": entries}))
    assert model is not None
    assert seqblocks.summarise(model).params == count


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "rope_scaling": {"type": "sqrt"}}, "rope_type is 'sqrt', but seqblocks only supports default,"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "short_factor of rope_parameters must be a list"),
        ({**LLAMA, "sliding_window": 3}, "an entry that seqblocks does not read in models of type llama: sliding_wi"),
        ({**GEMMA3, "layer_types": ["full"] * 2}, "layer_types has 'full', but seqblocks only supports"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is True, but"),
        ({**DENSE[4], "no_rope_layers": [1]}, "no_rope_layers has 1 entries, but num_hidden_layers is 2"),
        ({**LLAMA, "rms_norm_eps": 0.0}, "rms_norm_eps must be more than 0, not 0.0"),
        ({**DECODERS["gemma2"], "attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be more than 0, not 0.0"),
        ({**GEMMA3, "final_logit_softcapping": 0.0}, "final_logit_softcapping must be more than 0, not 0.0"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be more than 0, not 0.0"),
        *(({**DECODERS[kind], "sliding_window": 0}, "sliding_window must be at least 1, not 0")
          for kind in ("phi3", "mixtral", "mistral")),
        ({**DECODERS["phi3"], "partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0, which rotates 0 of 8 feat"),
        ({**QWEN35, "partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2, which rotates 3 of 16 features"),
        ({**NEMOTRON, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}, "num_experts_per_tok is 3, but topk_"),
        ({**DECODERS["deepseek_v3"], "num_experts_per_tok": 3}, "num_experts_per_tok is 3, but .* give a token 2"),
        ({**GRANITE, "time_step_limit": [float("inf"), 0.0]}, "time_step_limit .* must be two numbers of at least 0"),
        ([], "config.json is not a mapping"),
        ({}, "no model_type, but seqblocks can only generate specs for mamba, mamba_ssm, mamba2, .*, rwkv7: pass"),
        ({"model_type": "bert"}, "of model_type 'bert', but"),
        ({**MAMBA, "hidden_size": "16"}, "hidden_size must be a whole number, not '16'"),
        ({**MAMBA, "hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({**MAMBA, "vocab_size": None}, "vocab_size must be a whole number, not None"),
        ({"model_type": "mamba"}, "hidden_size must be a whole number, not None"),
        ({**MAMBA, "hidden_act": "gelu"}, "hidden_act is 'gelu', but seqblocks only supports 'silu'"),
        ({**MAMBA, "intermediate_size": 30}, r"intermediate_size is 30, but expand \* hidden_size is 32"),
        ({**MAMBA, "use_bias": "no"}, "use_bias must be true or false, not 'no'"),
        ({**OFFICIAL, "ssm_cfg": {"layer": "Mamba3"}}, "'Mamba3', but seqblocks only supports 'Mamba1' or 'Mamba2'"),
        ({**OFFICIAL, "ssm_cfg": {"layer": "Mamba2", "dt_limit": [1]}}, r"must be two numbers of at least 0, not \[1"),
        ({**OFFICIAL, "attn_layer_idx": [1]}, r"attn_layer_idx is \[1\], but"),
        ({**XLSTM, "norm_eps": "1"}, "norm_eps must be a number"),
        ({**MAMBA2, "num_heads": 3}, r"num_heads \* head_dim is 24, but expand \* hidden_size is 32"),
        ({**MAMBA2, "time_step_limit": [0.0, -1.0]}, r"must be two numbers of at least 0, not \[0\."),
        ({**GRIFFIN, "block_types": ["recurrent", "mamba"]}, "block_types has 'mamba', but seqblocks only supports"),
        ({**GRIFFIN, "rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', but seqblocks only supports"),
        ({**GRIFFIN, "rope_scaling": {"factor": 2}}, "rope_scaling is {'factor': 2}, but seqblocks only supports"),
        ({**GRIFFIN, "rope_parameters": 3}, "rope_parameters is not a mapping"),
        ({**QWEN, "attention_bias": True}, "attention_bias is True, but seqblocks only supports False"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({**KIMI, "num_expert_group": 8}, "num_expert_group is 8, but seqblocks only supports 1"),
        ({**KIMI, "mla_use_nope": False}, "mla_use_nope is False, but seqblocks only supports True"),
        ({**JAMBA, "mamba_inner_layernorms": False}, "mamba_inner_layernorms is False, but seqblocks only supports"),
        ({**KIMI, "linear_attn_config": 3}, "linear_attn_config is not a mapping"),
        ({**KIMI, "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        ({**BAMBA, "mamba_d_head": 5}, r"mamba_n_heads \* mamba_d_head is 20, but mamba_expand \* hidden_size is 32"),
        ({**FALCON_H1, "mamba_d_head": 4}, r"mamba_n_heads \* mamba_d_head is 16, but mamba_d_ssm is 24"),
        ({**FALCON_H1, "key_multiplier": 0.0}, "key_multiplier must be more than 0, not 0.0"),
        ({**FALCON_H1, "ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers, not"),
        ({**FALCON_H1, "mamba_use_mlp": False}, "mamba_use_mlp is False, but seqblocks only supports True"),
        ({**NEMOTRON, "hybrid_override_pattern": "MX"}, r"hybrid_override_pattern must consist of M, \*, - and E, not"),
        ({**NEMOTRON, "layers_block_type": []}, "there must be 1 to 4096 layers, not 0"),
        ({**NEMOTRON, "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', but seqblocks only supports 'relu2'"),
        ({**NEMOTRON, "attention_head_dim": 4}, "attention_head_dim is 4, but seqblocks only supports 8, head_dim"),
        ({**GRANITE, "layer_types": ["mamba"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({**GRANITE, "logits_scaling": 0}, "logits_scaling must be more than 0, not 0"),
        ({**GRANITE, "normalization_function": "layernorm"}, "normalization_function is 'layernorm', but"),
        ({**ZAMBA, "layers_block_type": None}, "layers_block_type must be a list, not None"),
        ({**ZAMBA, "layers_block_type": ["hybrid"]}, "layers_block_type has 1 entries, but num_hidden_layers is 2"),
        ({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, r"a quantization_config \(mxfp4\), and"),
        ({**DECODERS["gpt_oss"], "layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden"),
        ({**DECODERS["gpt_oss"], "sliding_window": None}, "sliding_window must be a whole number, not None"),
        ({**DECODERS["gpt_oss"], "swiglu_limit": 0.0}, "swiglu_limit must be more than 0, not 0.0"),
        ({**DECODERS["gpt_oss"], "experts_per_token": 3}, "experts_per_token is 3, but seqblocks only supports 2, num"),
        ({"model_type": "gemma3", "text_config": {"final_logit_softcapping": 5.0}}, "softcapping is 5.0, but"),
        ({**QWEN35, "attn_output_gate": False}, "attn_output_gate is False, but seqblocks only supports True"),
        ({**DECODERS["minimax"], "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but seqblocks only"),
        ({**DECODERS["minimax"], "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but seqblocks only"),
        ({**DECODERS["minimax"], "layer_types": ["linear_attention"]}, "layer_types has 1 entries, but num_hidden"),
        ({**RWKV, "rescale_every": 0.5}, "rescale_every must be a whole number, not 0.5"),
        ({**RWKV, "layer_norm_epsilon": None}, "layer_norm_epsilon must be a number, not None"),
        ({**FIRST_ZAMBA, "layers_block_type": None}, "layers_block_type has 3 entries, but num_hidden_layers is 2"),
        ({**FIRST_ZAMBA, "n_mamba_heads": 3}, "n_mamba_heads is 3, which does not divide mamba_expand"),
        ({**FIRST_ZAMBA, "tie_word_embeddings": False}, "tie_word_embeddings is False, but"),
        ({**FIRST_ZAMBA, "attention_hidden_size": 16}, "attention_hidden_size is 16, but seqblocks only supports 32"),
        ({**GLA, "use_short_conv": True}, "use_short_conv is True, but seqblocks only supports False"),
        ({**GLA, "model_type": "linear_attn", "feature_map": "exp"}, "feature_map is 'exp', but seqblocks only"),
        ({**JAMBA, "foo": 3}, "an entry that seqblocks does not read in models of type jamba: foo. Remove it if"),
        ({**JAMBA, "attention_bias": True, "attn_logit_softcapping": 5.0}, "entries .*attention_bias, attn_logit"),
        ({**MAMBA, "final_logit_softcapping": 30.0}, "an entry .*: final_logit_softcapping"),
        ({**OFFICIAL, "ssm_cfg": {"headdim": 8}}, r"an entry .*: ssm_cfg\.headdim"),
        ({**GRIFFIN, "rope_parameters": {"factor": 2.0}}, r"an entry .*: rope_parameters\.factor"),
        ({**KIMI, "linear_attn_config": {"gate_lower_bound": -5.0}}, r"linear_attn_config\.gate_lower_bound"),
        ({**GLA, "attnres_block_size": 2}, "attnres_block_size is 2, but seqblocks only supports None"),
        ({**GRIFFIN, "embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim is False, but"),
        *(({**config, "head_dim": 16}, "head_dim is 16, but .* only supports 8, hidden_size / num_attention_heads")
          for config in (GRIFFIN, OLMO, BAMBA, JAMBA)),
        ({**ZAMBA, "attention_head_dim": 8}, r"attention_head_dim is 8, but .* only supports 16, 2 \* hidden_size"),
        ({**ZAMBA, "attention_hidden_size": 8}, r"attention_hidden_size is 8, but .* only supports 32, 2 \* hidden"),
        ({**ZAMBA, "mamba_headdim": 4}, "mamba_headdim is 4, but seqblocks only supports 8, mamba_expand"),
        ({**ZAMBA, "hybrid_layer_ids": [0]}, r"hybrid_layer_ids is \[0\], but .* only supports \[1\], the hybrid"),
        ({**KIMI, "qk_head_dim": 8}, "qk_head_dim is 8, but seqblocks only supports 192, qk_nope_head_dim"),
        ({**GLA, "attn": {"layers": [1]}}, r"attn is {'layers': \[1\]}, but seqblocks only supports None"),
        ({**GLA, "model_type": "rwkv7", "head_dim": 8, "value_dim": [32, 16]}, r"value_dim is \[32, 16\], but seqb"),
    ],
)
def test_unsupported_configs(config: Any, message: str, tmp_path: Path) -> None:
    safetensors.save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(seqblocks.UsageError, match=message):
        seqblocks.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", HUB)
def test_every_entry_that_transformers_writes_is_read_or_harmless(family: str) -> None:
    config = transformers().models.auto.configuration_auto.CONFIG_MAPPING[family]().to_dict()
    config = json.loads(json.dumps(config))
    assert families.spec_text(config).startswith("seqblocks: 1")
    with pytest.raises(seqblocks.UsageError, match=r"does not read .*: odd_entry"):
        families.spec_text({**config, "odd_entry": 1})


@pytest.mark.parametrize(
    ("config", "older"),
    [
        (MAMBA, {"d_model": 16, "n_layer": 2, "fused_add_norm": True, "rms_norm": True, "ssm_cfg": {}, "d_inner": 32}),
        (OFFICIAL, {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "residual_in_fp32": True}),
        (KIMI, {"head_dim": 72, "use_grouped_topk": True, "rope_theta": 1e4, "auto_map": {"AutoModel": "m.Kimi"}}),
        (JAMBA, {"sliding_window": None, "num_logits_to_keep": 1, "router_aux_loss_coef": 0.001, "head_dim": 8}),
        (ZAMBA, {"kv_channels": 4, "use_conv_bias": True, "attention_head_dim": 16, "hybrid_layer_ids": [1]}),
        (QWEN35, {"attn_output_gate": True, "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "rope_parameters": {
            "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}}),
        (QWEN, {"use_sliding_window": False, "rope_scaling": None, "partial_rotary_factor": 0.25}),
        (GLA, {"conv_size": 4, "share_conv_kernel": True, "fuse_norm": True, "attn_mode": "chunk", "clamp_min": None}),
        (DECODERS["smollm3"], {"max_window_layers": 28, "use_sliding_window": False}),
        (DECODERS["qwen3_moe"], {"max_window_layers": 48, "use_sliding_window": False}),
        (DECODERS["gemma2"], {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
        (DECODERS["gemma3_text"], {"cache_implementation": "hybrid"}),
        (DECODERS["lfm2"], {"num_heads": 2, "theta": 1e6, "tie_embedding": True}),
        (DECODERS["gpt_neox"], {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0}),
    ],
)  # fmt: skip
def test_entries_of_releases_that_change_nothing(config: dict[str, Any], older: dict[str, Any]) -> None:
    assert families.spec_text({**config, **older}) == families.spec_text(config)


def test_entries_of_releases_that_describe_layers() -> None:
    """The release of FalconMamba says `expand: 16`, and the one of RecurrentGemma `_block_types`."""
    falcon = seqblocks.build_text(families.spec_text({**FALCON, "expand": 16, "intermediate_size": 24}), device="meta")
    assert falcon.layers[0].falcon_mamba_block.residual.out_proj.weight.shape == (16, 24)
    without = {key: value for key, value in GRIFFIN.items() if key != "block_types"}
    griffin = families.spec_text({**without, "_block_types": GRIFFIN["block_types"], "head_dim": 8})
    assert griffin == families.spec_text(GRIFFIN)


ROPE = [
    {**top, **below}
    for top in ({}, {"rope_theta": 5e5}, {"rope_theta": None})
    for below in (
        {}, {"rope_parameters": None}, {"rope_parameters": {}}, {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}, {"rope_parameters": {"rope_theta": None}},
    )
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_rotary_positions_of_olmo_are_those_that_transformers_reads(tmp_path: Path) -> None:
    library = transformers()
    for entries in ROPE:
        config = {**OLMO, **entries}
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = (library.AutoConfig.from_pretrained(tmp_path).rope_parameters or {}).get("rope_theta")
        assert f"rotary: {theirs or 0}," in families.spec_text(config), entries


def test_the_rotary_share_of_bamba_is_read_only_below_rope_parameters() -> None:
    """The values match those that transformers reads."""
    usual = families.spec_text({**BAMBA, "num_attention_heads": 1})
    assert "turned: 8," in usual
    assert families.spec_text({**BAMBA, "num_attention_heads": 1, "partial_rotary_factor": 1.0}) == usual
    below = {"rope_parameters": {"partial_rotary_factor": 1.0}}
    assert "turned: 16," in families.spec_text({**BAMBA, "num_attention_heads": 1, **below})


@pytest.mark.parametrize(
    ("config", "alias", "name", "value"),
    [
        (KIMI, "norm_topk_prob", "moe_renormalize", False),
        (KIMI, "n_shared_experts", "num_shared_experts", 2),
        (KIMI, "num_local_experts", "num_experts", 3),
        (KIMI, "num_experts_per_tok", "num_experts_per_token", 1),
        (JAMBA, "num_local_experts", "num_experts", 5),
        (GRIFFIN, "sliding_window", "attention_window_size", 4),
        (DECODERS["minimax"], "num_experts", "num_local_experts", 5),
        (DECODERS["gpt_oss"], "num_experts", "num_local_experts", 5),
        (GRANITE, "layers_block_type", "layer_types", ["attention", "mamba"]),
        (NEMOTRON, "num_local_experts", "n_routed_experts", 5),
        (RWKV, "max_position_embeddings", "context_length", 64),
        (FIRST_ZAMBA, "head_dim", "attention_head_dim", 4),
        (FIRST_ZAMBA, "layer_types", "layers_block_type", ["hybrid", "mamba"]),
        (ZAMBA, "layer_types", "layers_block_type", ["hybrid", "mamba"]),
    ],
)  # fmt: skip
def test_second_names_of_entries_are_read(config: dict[str, Any], alias: str, name: str, value: Any) -> None:
    without = {key: entry for key, entry in config.items() if key != name}
    expected = families.spec_text({**without, name: value})
    assert families.spec_text({**without, alias: value}) == expected
    assert families.spec_text({**without, alias: value, name: value}) == expected
    other = [*value, "mamba"] if isinstance(value, list) else value + 1
    with pytest.raises(seqblocks.UsageError, match=f"{alias} is .* and {name} is .*: these are two names of one entry"):
        families.spec_text({**without, alias: value, name: other})


def test_groups_of_experts_are_refused_by_either_name() -> None:
    with pytest.raises(seqblocks.UsageError, match="num_expert_group is 8, but seqblocks only supports 1"):
        families.spec_text({**KIMI, "n_group": 8})


def test_second_names_are_those_of_transformers() -> None:
    mapping = transformers().models.auto.configuration_auto.CONFIG_MAPPING
    for family, names in families.ALIASES.items():
        assert names.items() <= mapping[family].attribute_map.items()
