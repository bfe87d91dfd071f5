"""Bundled transformers of published designs give the logits of transformers, with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.checkpoint import load_official
from seqblocks.checkpoint.weight_files import weights_in

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # a warning of transformers about kernels that are not installed

GEMMA = {"dim": 16, "heads": 4, "kv_heads": 2, "head": 6, "hidden": 20, "rounds": 2, "window": 5, "vocabulary": 11}
DEEPSEEK = {
    "dim": 16, "heads": 2, "head": 6, "turned": 4, "rank": 8, "hidden": 12, "experts": 6, "top": 2, "each": 8,
    "layers": "d m m", "vocabulary": 11,
}  # fmt: skip
FALCON = {
    "dim": 16, "depth": 3, "heads": 2, "kv_heads": 1, "head": 6, "ssm": 24, "ssm_head": 4, "state": 4, "hidden": 20,
    "vocabulary": 11,
}  # fmt: skip
LFM2 = {
    "dim": 16, "layers": "c a c", "heads": 4, "kv_heads": 2, "head": 4, "hidden": 16, "vocabulary": 11,
}  # fmt: skip
NEMOTRON = {
    "dim": 16, "layers": "m f m a f", "heads": 4, "kv_heads": 2, "head": 6, "ssm": 24, "ssm_head": 4, "groups": 2,
    "state": 4, "hidden": 20, "vocabulary": 11,
}  # fmt: skip
RWKV = {"dim": 12, "depth": 3, "hidden": 20, "vocabulary": 11}
YARN = {
    "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10000.0,
}  # fmt: skip


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=11, hidden_size=16, intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, query_pre_attn_scalar=6, sliding_window=5,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def deepseek_v2() -> Any:
    config = transformers.DeepseekV2Config(
        vocab_size=11, hidden_size=16, intermediate_size=12, moe_intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=2, n_routed_experts=6, num_experts_per_tok=2,
        q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6,
        first_k_dense_replace=1, max_position_embeddings=163840, rope_parameters=YARN,
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


def falcon_h1() -> Any:
    """The multipliers, and what else is not a size, are those of the config.json of the 0.5B release."""
    config = transformers.FalconH1Config(
        vocab_size=11, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, mamba_d_ssm=24, mamba_n_heads=6, mamba_d_head=4, mamba_d_state=4,
        mamba_chunk_size=8, mamba_norm_before_gate=False, attention_out_multiplier=0.9375,
        embedding_multiplier=5.656854249492381, key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625,
        mlp_multipliers=[0.8838834764831844, 0.5859375], ssm_in_multiplier=1.25,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551587, rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    )  # fmt: skip
    return transformers.FalconH1ForCausalLM(config)


def lfm2() -> Any:
    config = transformers.Lfm2Config(
        vocab_size=11, hidden_size=16, intermediate_size=24, block_multiple_of=8, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, full_attn_idxs=[1],
    )  # fmt: skip
    return transformers.Lfm2ForCausalLM(config)


def nemotron_h() -> Any:
    config = transformers.NemotronHConfig(
        vocab_size=11, hidden_size=16, intermediate_size=20, hybrid_override_pattern="M-M*-", num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, mamba_num_heads=6, mamba_head_dim=4, n_groups=2, ssm_state_size=4,
        chunk_size=8,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def rwkv() -> Any:
    config = transformers.RwkvConfig(
        vocab_size=11, hidden_size=12, intermediate_size=20, num_hidden_layers=3, rescale_every=0
    )
    return transformers.RwkvForCausalLM(config)


CASES = {
    "gemma2_2b": (gemma2, GEMMA),
    "deepseek_v2_lite": (deepseek_v2, DEEPSEEK),
    "falcon_h1_0_5b": (falcon_h1, FALCON),
    "lfm2_350m": (lfm2, LFM2),
    "nemotron_h_4b": (nemotron_h, NEMOTRON),
    "rwkv4_169m": (rwkv, RWKV),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In float32, with weights as large as their inputs, so that soft caps, positions and routers matter."""
    make, sizes = CASES[name]
    theirs = make().eval()
    with torch.no_grad():
        for at, parameter in enumerate(theirs.parameters()):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(at))
    theirs.config._attn_implementation = "eager"  # the other implementations have no soft cap
    theirs.save_pretrained(tmp_path)
    ours = seqblocks.build(name, set=sizes).eval()
    files = weights_in(tmp_path)
    load_official(ours, {key: files.read(key) for key in files.headers})
    ids = torch.randint(0, 11, (2, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = theirs(ids, use_cache=False).logits, ours(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item())


def test_nemotron_h_has_the_size_of_the_release_with_8_billion_parameters() -> None:
    model = seqblocks.load_model("nemotron_h_4b", set={"dim": 4096, "ssm": 8192, "hidden": 21504})
    assert seqblocks.summarise(model).params == 8_100_852_736
