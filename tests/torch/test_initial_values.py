"""A model whose spec was written from a config.json starts from the same distributions as the class of transformers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.checkpoint.families import spec_text
from seqblocks.parameters import Init
from tests.sampled import sampled

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"hidden_size": 64, "vocab_size": 200, "num_hidden_layers": 4, **NO_TOKENS}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {**SIZES, "use_bias": True, "tie_word_embeddings": False}
MAMBA2 = {**MAMBA, "num_heads": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
STEPS = {"time_step_min": 0.01, "time_step_max": 0.3, "time_step_floor": 0.02}
OTHER = {"initializer_range": 0.05}
GEMMA = {**HEADS, "lru_width": 80, "attention_bias": True, "logits_soft_cap": 30.0, "num_hidden_layers": 3}
QWEN = {
    **HEADS, **MIXED, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32, "mlp_only_layers": [0, 1],
}  # fmt: skip
OLMO = {
    **HEADS, **MIXED, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "attention_bias": True,
}  # fmt: skip
KIMI = {
    **HEADS, **MIXED, "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
    "linear_head_dim": 8, "linear_num_heads": 8, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "attention_bias": True,
}  # fmt: skip
JAMBA = {
    **HEADS, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 2,
    "expert_layer_period": 4, "mamba_dt_rank": 8, "mamba_conv_bias": True, "mamba_proj_bias": True,
}  # fmt: skip
BAMBA = {
    **HEADS, "attn_layer_indices": [1, 3], "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_conv_bias": True, "mamba_proj_bias": True, "mamba_chunk_size": 8, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
ZAMBA = {
    **HEADS, "num_hidden_layers": 5, "layers_block_type": ["hybrid", "linear_attention", "hybrid"] + ["hybrid"] * 2,
    "num_key_value_heads": 4, "mamba_d_state": 16, "n_mamba_heads": 16, "num_mem_blocks": 2, "adapter_rank": 12,
    "use_shared_attention_adapter": True, "mamba_ngroups": 2, "chunk_size": 8, "add_bias_linear": True,
}  # fmt: skip
NO_LIST = {key: value for key, value in BAMBA.items() if key not in ("attn_layer_indices", "mlp_bias")}
GRANITE = {**NO_LIST, **MIXED, "num_local_experts": 4, "shared_intermediate_size": 32}
FALCON_H1 = {**NO_LIST, "mamba_d_ssm": None, "mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True}
LFM2_MOE = {
    **HEADS, "layer_types": ["conv", "full_attention"] * 2, "conv_bias": True, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 2,
}  # fmt: skip
FIRST_ZAMBA = {
    **HEADS, "num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["hybrid"],
    "mamba_dt_rank": 8, "n_mamba_heads": 4, "mamba_proj_bias": True,
}  # fmt: skip
GPT_OSS = {
    **HEADS, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
OF_EXPERTS = ("mlp_only_layers", "moe_intermediate_size")
QWEN35 = {key: value for key, value in QWEN.items() if "expert" not in key and key not in OF_EXPERTS}
XLSTM = {"vocab_size": 200, "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 3, "use_bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", MAMBA),
    "mamba_rescaled": (
        "Mamba", {**MAMBA, **OTHER, **STEPS, "rescale_prenorm_residual": True, "time_step_scale": 0.5}
    ),
    "mamba_constant": ("Mamba", {**MAMBA, "time_step_init_scheme": "constant"}),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "falcon_mamba_rescaled": (
        "FalconMamba", {**MAMBA, **OTHER, **STEPS, "rescale_prenorm_residual": True, "time_step_scale": 0.5}
    ),
    "falcon_mamba_constant": ("FalconMamba", {**MAMBA, "time_step_init_scheme": "constant"}),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2_rescaled": ("Mamba2", {**MAMBA2, **OTHER, **STEPS, "rescale_prenorm_residual": True}),
    "xlstm": ("xLSTM", XLSTM),
    "recurrent_gemma": ("RecurrentGemma", GEMMA),
    "recurrent_gemma_other": ("RecurrentGemma", {**GEMMA, "w_init_variance_scale": 0.04, "conv1d_width": 3}),
    "qwen3_next": ("Qwen3Next", QWEN),
    "qwen3_next_other": ("Qwen3Next", {**QWEN, **OTHER}),
    "olmo_hybrid": ("OlmoHybrid", OLMO),
    "olmo_hybrid_other": (
        "OlmoHybrid", {**OLMO, **OTHER, "linear_a_log_min": 1.0, "linear_a_log_max": 8.0, "linear_dt_min": 0.01}
    ),
    "kimi_linear": ("KimiLinear", {**KIMI, "q_lora_rank": 20}),
    "kimi_linear_other": ("KimiLinear", {**KIMI, **OTHER, "q_lora_rank": None}),
    "jamba": ("Jamba", JAMBA),
    "jamba_other": ("Jamba", {**JAMBA, **OTHER}),
    "bamba": ("Bamba", BAMBA),
    "bamba_other": ("Bamba", {**BAMBA, **OTHER}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**GRANITE, **OTHER}),
    "falcon_h1": ("FalconH1", {**FALCON_H1, **OTHER}),
    "lfm2_moe": ("Lfm2Moe", {**LFM2_MOE, **OTHER}),
    "gpt_oss": ("GptOss", {**GPT_OSS, **OTHER}),
    "qwen3_5_text": ("Qwen3_5", {**QWEN35, **OTHER}),
    "minimax": ("MiniMax", {**HEADS, **MIXED, **OTHER, "num_local_experts": 4}),
    "rwkv": ("Rwkv", {**SIZES, "attention_hidden_size": 48, "rescale_every": 2}),
    "zamba": ("Zamba", FIRST_ZAMBA),
    "zamba_other": ("Zamba", {**FIRST_ZAMBA, **OTHER, **STEPS}),
    "zamba2": ("Zamba2", ZAMBA),
    "zamba2_other": ("Zamba2", {**ZAMBA, **OTHER, **STEPS}),
}


def pooled(model: Any) -> dict[str, Tensor]:
    """Return all values of each parameter, those of all layers and experts together."""
    found = defaultdict(list)
    for name, parameter in model.named_parameters():
        found[re.sub(r"\.\d+\.", ".*.", name)].append(parameter.detach().flatten())
    return {name: torch.cat(values).double() for name, values in found.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of the empirical distribution functions (Kolmogorov and Smirnov)."""
    both = torch.cat([a, b])
    first, second = (torch.searchsorted(x.sort().values, both, right=True) / len(x) for x in (a, b))
    return float((first - second).abs().max())


def std_error(x: Tensor) -> float:
    """Return the relative standard error of the standard deviation: sqrt((kurtosis - 1) / 4n)."""
    kurtosis = ((x - x.mean()) ** 4).mean() / x.var() ** 2
    return math.sqrt((float(kurtosis) - 1) / (4 * len(x)))


def assert_alike(name: str, a: Tensor, b: Tensor) -> None:
    """Assert that two samples are equal, or of one distribution.

    The distance of two samples of one distribution exceeds sqrt(ln(2 / p) (1 / n + 1 / m) / 2) with probability p.
    """
    if torch.allclose(a, b, rtol=1e-6, atol=1e-7):  # constants; the two sides round logarithms differently
        return
    limit = math.sqrt(math.log(2 / 1e-9) / 2 * (1 / len(a) + 1 / len(b)))
    assert distance(a, b) < limit, f"{name}: {a.mean():.4f}, {a.std():.4f} or {b.mean():.4f}, {b.std():.4f}"
    error = math.hypot(std_error(a), std_error(b))
    assert abs(math.log(a.std() / b.std())) < 6 * error, f"{name}: std {a.std():.4f} or {b.std():.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CASES))
def test_parameters_start_from_the_distributions_of_transformers(case: str, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="needs the extra `hub`")
    name, config = CASES[case]
    torch.manual_seed(0)
    kind = {"Qwen3_5": "Qwen3_5TextConfig"}.get(name, f"{name}Config")
    getattr(library, f"{name}ForCausalLM")(getattr(library, kind)(**config)).save_pretrained(tmp_path)
    loaded = seqblocks.from_pretrained(tmp_path)
    theirs, ours = pooled(loaded), pooled(seqblocks.build_model(loaded.spec, seed=1))
    assert ours.keys() == theirs.keys()
    for parameter, values in theirs.items():
        assert_alike(parameter, values, ours[parameter])


def declared(config: dict[str, Any], kind: str = "") -> dict[str, Init]:
    """Return the initialisers in the spec of a config."""
    file, found = check.load_text(spec_text({"model_type": kind, **config}))
    return {item.name: item.parameter.init for item in graph.parameters(check.require_model(file, found).graph)}


def test_initializer_range_is_the_std_of_all_weights_of_a_hybrid() -> None:
    for std in (0.02, 0.05):
        normal = Init("normal", (0.0, std))
        found = declared({**BAMBA, "initializer_range": std}, "bamba")
        matrices = {name for name in found if name.endswith("weight") and "norm" not in name and "mixer.y." not in name}
        assert len(matrices) > 20
        assert {found[name] for name in matrices} == {normal}
        assert {init.name for name, init in found.items() if name.endswith("_proj.bias")} == {"zeros"}
    assert declared({**BAMBA, "initializer_range": None}, "bamba") == declared(BAMBA, "bamba")


def test_a_config_without_initializer_range_has_the_default_of_its_class() -> None:
    assert declared(JAMBA, "jamba")["embed.weight"] == Init("normal", (0.0, 0.02))
    for kind, config in (("mamba", MAMBA), ("falcon_mamba", MAMBA), ("mamba2", MAMBA2)):
        assert declared(config, kind)["embed.weight"] == Init("normal", (0.0, 0.1))


def test_an_official_mamba_keeps_the_initial_values_of_its_package() -> None:
    sizes = {"d_model": 32, "n_layer": 2, "vocab_size": 64, "tie_embeddings": False}
    steps = {"dt_min": 0.01, "dt_init_floor": 0.02, "dt_scale": 0.5, "dt_init": "constant"}
    found = declared({**sizes, "ssm_cfg": {"bias": True, **steps}})
    mixer = "layers.1.mamba_block.residual.mixer"
    bound = 1 / math.sqrt(64 * 2)
    expected = {
        "embed.weight": Init("normal", (0.0, 0.02)),
        f"{mixer}.in_proj.weight": Init("fan_in_uniform"),
        f"{mixer}.in_proj.bias": Init("zeros"),
        f"{mixer}.conv1d.bias": Init("fan_in_uniform"),
        f"{mixer}.dt_proj.weight": Init("uniform", (0.5 / math.sqrt(2),) * 2),
        f"{mixer}.dt_proj.bias": Init("inverse_softplus", (0.01, 0.1, 0.02)),
        f"{mixer}.out_proj.weight": Init("uniform", (-bound, bound)),
        f"{mixer}.out_proj.bias": Init("zeros"),
        "unembed.weight": Init("fan_in_uniform"),
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mamba", {**MAMBA, "time_step_min": 0.0}),
        ("mamba2", {**MAMBA2, "time_step_min": 0.5}),
        ("zamba2", {**ZAMBA, "time_step_floor": -1.0}),
        ("olmo_hybrid", {**OLMO, "linear_a_log_min": 20.0}),
        ("recurrent_gemma", {**GEMMA, "block_types": ["recurrent"], "w_init_variance_scale": -1.0}),
        ("jamba", {**JAMBA, "initializer_range": 0}),
        ("bamba", {**BAMBA, "initializer_range": "0.02"}),
        ("qwen3_next", {**QWEN, "initializer_range": -0.02}),
        ("mamba2", {**MAMBA2, "initializer_range": 1e-30, "time_step_floor": None, "rescale_prenorm_residual": None}),
        ("falcon_mamba", {**MAMBA, "time_step_max": 1e30, "time_step_scale": -1.0}),
        ("olmo_hybrid", {**OLMO, "linear_a_log_max": "16", "linear_dt_min": 10**400}),
    ],
)
def test_initial_values_that_do_not_exist_do_not_prevent_loading(kind: str, config: dict[str, Any]) -> None:
    assert declared(config, kind)
