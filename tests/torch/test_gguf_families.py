"""GGUF files of transformers' models: tensors transformed back to those of transformers, metadata, and refusals.

benchmarks/gguf_logits.py compares logits with llama.cpp itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import seqblocks
from benchmarks.gguf_models import CASES, ROPE, YARN, built
from seqblocks.checkpoint import to_gguf
from seqblocks.errors import RunError, UsageError
from tests.sampled import sampled

gguf = pytest.importorskip("gguf", reason="an optional extra; the test extra installs it")
safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")
pytest.importorskip("transformers", reason="needs the extra `hub`")

GOLDEN = Path(__file__).parent.parent / "golden" / "gguf"

# Official names without `….layers.N.`, and the tensors of llama.cpp without `blk.N.`.
OUTSIDE = {
    "token_embd": "model.embed_tokens backbone.embeddings gpt_neox.embed_in",
    "output_norm": "model.norm model.final_layernorm backbone.norm_f gpt_neox.final_layer_norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head embed_out",
}
NAMES = {
    "attn_norm": "input_layernorm norm operator_norm",
    "ffn_norm": "pre_feedforward_layernorm pre_ff_layernorm ffn_norm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj mixer.q_proj", "attn_k": "self_attn.k_proj mixer.k_proj",
    "attn_v": "self_attn.v_proj mixer.v_proj",
    "attn_qkv": "self_attn.qkv_proj attention.query_key_value linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z self_attn.output_gate", "attn_norm_2": "self_attn.norm",
    "ssm_alpha": "linear_attn.in_proj_a",
    "attn_output": "self_attn.o_proj self_attn.out_proj mixer.o_proj attention.dense",
    "attn_q_norm": "self_attn.q_norm self_attn.q_layernorm", "attn_k_norm": "self_attn.k_norm self_attn.k_layernorm",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj feed_forward.gate_proj feed_forward.w1 block_sparse_moe.gate_proj",
    "ffn_up": "mlp.up_proj feed_forward.up_proj feed_forward.w3 mlp.gate_up_proj mlp.dense_h_to_4h mixer.up_proj "
    "block_sparse_moe.up_proj",
    "ffn_down": "mlp.down_proj feed_forward.down_proj feed_forward.w2 mlp.dense_4h_to_h mixer.down_proj "
    "block_sparse_moe.down_proj",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.gate mlp.router feed_forward.router feed_forward.gate block_sparse_moe.gate mixer.gate "
    "block_sparse_moe.router.layer",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj mlp.shared_experts.gate_proj "
    "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj mlp.shared_experts.up_proj block_sparse_moe.shared_experts.up_proj "
    "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj mlp.shared_experts.down_proj "
    "block_sparse_moe.shared_experts.down_proj mixer.shared_experts.down_proj",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias block_sparse_moe.gate.e_score_correction_bias "
    "mixer.gate.e_score_correction_bias "
    "feed_forward.expert_bias",
    "ssm_in": "mamba.in_proj mixer.in_proj", "ssm_x": "mamba.x_proj mixer.x_proj",
    "ssm_dt": "mamba.dt_proj mixer.dt_proj",
    "ssm_dt.bias": "mamba.dt_bias mixer.dt_bias linear_attn.dt_bias self_attn.dt_bias",
    "ssm_conv1d": "mamba.conv1d mixer.conv1d linear_attn.conv1d",
    "ssm_conv1d_q": "self_attn.q_conv1d", "ssm_conv1d_k": "self_attn.k_conv1d", "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_a": "mamba.A_log mixer.A_log linear_attn.A_log self_attn.A_log", "ssm_d": "mamba.D mixer.D",
    "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm", "ssm_c_norm": "mamba.c_layernorm",
    "ssm_norm": "mamba.norm mixer.norm linear_attn.norm self_attn.o_norm",
    "ssm_out": "mamba.out_proj mixer.out_proj linear_attn.out_proj",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "self_attn.b_proj linear_attn.in_proj_b",
    "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj", "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
OURS = {official: name for names in (OUTSIDE, NAMES) for name, some in names.items() for official in some.split()}
# Where post_attention_layernorm is just that.
AFTER_ATTENTION = ("gemma2", "gemma3_text", "gpt_oss", "olmo2", "qwen3_5_text", "qwen3_next")
EXPERT = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def tensors_of(file: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """Return the metadata, the tensors, and their types."""
    reader = gguf.GGUFReader(file)
    metadata = {name: each.contents() for name, each in reader.fields.items()}
    values = {x.name: torch.from_numpy(numpy.array(gguf.dequantize(x.data, x.tensor_type))) for x in reader.tensors}
    return metadata, values, {x.name: x.tensor_type.name for x in reader.tensors}


def official_name(case: str, name: str) -> str:
    """Return the tensor of llama.cpp for an official name."""
    stem, _, kind = name.rpartition(".")
    match = re.match(r".*?layers\.(\d+)\.(.*)", name)
    if not match:
        return f"{OURS[stem]}.{kind}"
    layer, rest = match.groups()
    stem = rest.rpartition(".")[0]
    if stem == "post_attention_layernorm":
        short = f"post_attention_norm.{kind}" if case in AFTER_ATTENTION else f"ffn_norm.{kind}"
    elif rest in OURS:
        short = OURS[rest] + ("" if "." in OURS[rest] or OURS[rest] in ("ssm_a", "ssm_d") else ".weight")
    elif case.startswith("falcon_h1") and stem == "pre_ff_layernorm":
        short = "ffn_norm"
    else:
        short = f"{OURS[stem]}.{kind}"
    return f"blk.{layer}.{short}"


def restored(case: str, name: str, x: dict[str, Tensor], config: Any) -> tuple[Tensor, list[str]]:
    """Return a tensor of transformers, computed from those of llama.cpp, and the names of these."""
    layer, _, part = name.partition("layers.")[2].partition(".")
    sparse = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    several = {
        "input_linear.weight": ("ffn_gate{}.weight", "ffn_up{}.weight"),
        "in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
        "kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
        "shared_mlp.output_linear.weight": ("ffn_down{}.weight",),
    }
    shorts = next((some for end, some in several.items() if part.endswith(end)), ())
    used = [f"blk.{layer}.{short.format('_exps' if 'block_sparse' in part else sparse)}" for short in shorts]
    parts = [x[each] for each in used]
    if match := re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name):
        kind = "bias" if match[2] else "weight"
        used = [f"blk.{layer}.ffn_{one}_exps.{kind}" for one in match[1].split("_")]
        joined = torch.stack([x[each] for each in used], 2).flatten(1, 2)  # rows of both in turn
        return joined if match[2] else joined.mT, used
    if match := re.search(r"experts\.(\d+)\.(\w+)\.weight", name):
        used = [f"blk.{layer}.ffn_{EXPERT[match[2]]}_exps.weight"]
        beta = config.mlp_beta_factor if case == "minimax" and match[2] == "w2" else 1.0
        return x[used[0]][int(match[1])] / beta, used
    if "qkvz" in part:
        keys, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        q, k, v = parts[0].split([keys * key, keys * key, config.linear_num_value_heads * value])
        return torch.cat([each.reshape(keys, -1, each.shape[-1]) for each in (q, k, v, parts[1])], 1), used
    if "kv_b_proj" in part:
        return torch.cat([parts[0].mT, parts[1]], 1), used
    if parts:
        return torch.cat(parts, -2), used
    used = [official_name(case, name)]
    return undone(case, name, x[used[0]], config), used


def undone(case: str, name: str, x: Tensor, config: Any) -> Tensor:
    """Return a tensor of transformers that is a single one in llama.cpp."""
    if case.startswith(("llama", "mistral", "mixtral", "smollm3", "granite", "bamba")) and re.search("[qk]_proj", name):
        heads = x.unflatten(0, (config.num_attention_heads if "q_proj" in name else config.num_key_value_heads, -1))
        turned = int(heads.shape[1] * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return torch.cat([heads[:, :turned:2], heads[:, 1:turned:2], heads[:, turned:]], 1).flatten(0, 1)
    if "query_key_value" in name:
        return torch.stack([each.unflatten(0, (config.num_attention_heads, -1)) for each in x.chunk(3)], 1)
    if case.startswith("deepseek") and re.search("(q_a|kv_a)_proj", name):
        rows = x.shape[0] if "q_a" in name else config.kv_lora_rank
        return torch.cat([x[:rows] * (1e-6 / config.rms_norm_eps) ** 0.5, x[rows:]])
    if case == "minimax" and re.search(r"self_attn\.(o|out)_proj", name):
        return x / (config.full_attn_beta_factor if "o_proj" in name else config.linear_attn_beta_factor)
    if case == "falcon_mamba" and "x_proj" in name:
        return x * (config.mixer_rms_eps / config.layer_norm_epsilon) ** 0.5
    if case == "qwen3_5_text" and re.search(r"linear_attn\.(?!norm)", name):
        x = heads_by_keys(name, x, config)
    if name.endswith("A_log"):
        return torch.log(-x)
    around_one = ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_next")
    if case in around_one and re.search(r"(?<!linear_attn\.)norm\.weight", name):
        return x - 1
    return x / factor(name, config) if case.startswith("falcon_h1") else x


def heads_by_keys(name: str, x: Tensor, config: Any) -> Tensor:
    """Return a tensor with the heads of values of the first key before those of the second."""
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    axis = int("out_proj" in name)
    same, values = x.split([before, x.shape[axis] - before], axis)
    heads = torch.stack(values.unflatten(axis, (count // keys, keys, -1)).unbind(axis), axis + 1)
    return torch.cat([same, heads.flatten(axis, axis + 2)], axis)


def factor(name: str, config: Any) -> float | Tensor:
    """Return what a tensor of Falcon-H1 was multiplied by."""
    last = name.split(".")[-2]
    simple = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier,
        "q_proj": config.attention_in_multiplier, "v_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier, "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }  # fmt: skip
    if last != "in_proj":
        return float(simple.get(last, 1.0))
    inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    states = config.mamba_n_groups * config.mamba_d_state
    sizes = (inner, inner, states, states, config.mamba_n_heads)
    rows = [torch.full((size,), value) for size, value in zip(sizes, config.ssm_multipliers, strict=True)]
    return torch.cat(rows)[:, None] * config.ssm_in_multiplier


def saved(folder: Path, case: str, **more: Any) -> Any:
    model = built(CASES[case], **more)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", sampled(list(CASES), ci=1))
def test_a_file(case: str, tmp_path: Path, update_golden: bool) -> None:
    """All tensors of transformers follow from the file, each of the file is used, and metadata are those expected."""
    model = saved(tmp_path / "model", case)
    summary = to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    metadata, tensors, types = tensors_of(tmp_path / "x.gguf")
    assert summary.tensors == len(tensors)
    left = dict.fromkeys(tensors)
    stored = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    wanted = {name: x for name, x in stored.items() if not re.search(r"(slope_rate|_decay)$", name)}  # not weights
    # Rounding of float32: a product and a quotient, 1 + x - 1, or an exponential and a logarithm, of numbers below 8.
    close = {"atol": 8 * 2**-23, "rtol": 4 * 2**-23}
    for name, value in wanted.items():
        found, used = restored(case, name, tensors, model.config)
        torch.testing.assert_close(found.reshape(value.shape), value, **close, msg=name)
        for each in used:
            left.pop(each, None)
    left = {name for name in left if not name.startswith("rope_")}
    assert left <= {"output.weight"}
    if left:  # a copy, because llama.cpp has no tied head in this architecture
        copy = tensors["token_embd.weight"]
        if case.startswith("falcon_h1"):
            copy = copy / model.config.embedding_multiplier * model.config.lm_head_multiplier
        torch.testing.assert_close(tensors["output.weight"], copy, **close)
    compare(GOLDEN / f"{case}.txt", described(metadata, tensors, types), update_golden)


def test_another_spec_than_that_of_its_config(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    vocabulary, dim = built(CASES["llama"]).get_input_embeddings().weight.shape
    steps = f"[{{embed: {{features: {dim}}}}}, {{unembed: {{bias: false, tie: embed}}}}]"
    maps = "checkpoint: {embed: model.embed_tokens}"
    text = f"seqblocks: 1\nmodel: {{input: {{tokens: {vocabulary}}}, steps: {steps}}}\n{maps}\n"
    (tmp_path / "own.yaml").write_text(text)
    small = {"model.embed_tokens.weight": torch.zeros(vocabulary, dim)}
    safetensors.save_file(small, tmp_path / "model" / "model.safetensors")
    with pytest.raises(RunError, match=r"another one than its config\.json describes: no step is named `layers`"):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf", spec=tmp_path / "own.yaml")


def described(metadata: dict[str, Any], tensors: dict[str, Tensor], types: dict[str, str]) -> str:
    """Return metadata and tensors as text, equal tensors of several layers in one line."""
    facts = {key: value for key, value in metadata.items() if not key.startswith("GGUF.")}
    lines = [f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}" for key, value in facts.items()]
    layers: dict[str, list[str]] = {}
    for name, x in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        at, short = match.groups() if match else ("", name)
        layers.setdefault(f"{short} {types[name]} {list(x.shape)}", []).append(at)
    lines += [f"{text}{' in ' + ' '.join(at) if at[0] else ''}" for text, at in layers.items()]
    return "\n".join(lines) + "\n"


def compare(file: Path, text: str, update: bool) -> None:
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize(
    ("case", "more", "reason"),
    [
        ("mistral", {"sliding_window": 64}, "llama computes another model: sliding_window is 64"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "layer_types is"),
        ("qwen3", {"attention_bias": True}, "qwen3 computes another model: attention_bias is True"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("smollm3", {"no_rope_layer_interval": 2, "no_rope_layers": None}, "no_rope_layer"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping or final_logit_softcapping is null"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16, but it uses head_dim, 32"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("phi3", {"sliding_window": 8}, "sliding_window is 8"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}, "no rope_type 'dynamic'"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "yarn has beta_fast 32.0, not 16.0"),
        ("qwen2", {"rope_parameters": CASES["llama"].config["rope_parameters"]}, "no rope_type 'llama3'"),
        ("llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "rotates all features, not 16"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False"),
        ("gpt_oss", {"swiglu_limit": 3.0}, r"swiglu_limit is 3\.0"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "layer_types is"),
        ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}, "yarn has truncate True, not False"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("jamba", {"mamba_expand": 3}, "mamba_expand is 3"),
        ("bamba", {"mamba_proj_bias": True}, "granitehybrid computes another model: mamba_proj_bias is True"),
        ("bamba", {"attn_layer_indices": []}, "no layer is attention"),
        ("bamba", {"attn_layer_indices": [0, 1, 2, 3]}, "no layer is Mamba-2"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, "topk_method is"),
        ("deepseek_v2", {"rope_parameters": {**YARN, "factor": 1.0}}, r"yarn has a factor above 1, not 1\.0"),
        ("deepseek_v2", {"first_k_dense_replace": 4}, "no layer has experts"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v3", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}, "no rope_type 'linear'"),
        ("minimax", {"mlp_alpha_factor": 1.0}, r"mlp_alpha_factor differ: \[1\.3, 1\.3, 1\.0\]"),
        ("minimax", {"rms_norm_eps": 1e-2}, "also that of the norm in linear attention, where 1e-06 is needed"),
        ("minimax", {"sliding_window": 8}, "sliding_window is 8"),
        ("falcon_mamba", {"use_bias": True}, "use_bias is True"),
        ("falcon_mamba", {"use_conv_bias": False}, "use_conv_bias is False"),
        ("falcon_mamba", {"intermediate_size": 192}, "it has 128 inner features at width 64, not 192"),
        ("falcon_h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate is true, but it gates before the norm"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias is True"),
        ("granite", {"layer_types": ["mamba"] * 4}, "no layer is attention"),
        ("granite", {"time_step_limit": (0.1, 0.5)}, "time_step_limit"),
        ("qwen3_next", {"linear_value_head_dim": 32}, "linear_key_head_dim and linear_value_head_dim differ"),
        ("qwen3_next", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, but it adds the same to a key's sum of squares"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "no layer is attention"),
        ("qwen3_5_text", {"linear_value_head_dim": 16}, "linear_key_head_dim and linear_value_head_dim differ"),
        ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank is 8"),
        ("kimi_linear", {"linear_num_heads": 2}, "must have the same number of heads"),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "must come before"),
        ("nemotron_h", {"use_bias": True}, "use_bias is True"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias is False"),
        ("lfm2_moe", {"routed_scaling_factor": 1.5}, "routed_scaling_factor is 1.5"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act is relu, but it computes gelu"),
    ],
)
def test_entries_that_llama_cpp_does_not_compute_are_refused(
    tmp_path: Path, case: str, more: dict[str, Any], reason: str
) -> None:
    saved(tmp_path / "model", case, **more)
    with pytest.raises(RunError, match=reason):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("given", ["512", 512.5, 0, True, 2**32])
def test_the_number_of_positions_is_a_whole_number(tmp_path: Path, given: Any) -> None:
    """llama.cpp reads no file with another kind of number, and none is above 32 bits."""
    saved(tmp_path / "model", "qwen3")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": given}))
    if given == 2**32:
        to_gguf(tmp_path / "model", tmp_path / "x.gguf")
        assert tensors_of(tmp_path / "x.gguf")[0]["qwen3.context_length"] == 2**32 - 1
        return
    with pytest.raises(UsageError, match=f"max_position_embeddings must be a whole number.*, not {given!r}"):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf")


def test_the_angles_of_gpt_oss_releases_are_accepted(tmp_path: Path) -> None:
    """llama.cpp rounds the range of YaRN, where all releases do not."""
    released = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    angles = {**released, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    saved(tmp_path / "model", "gpt_oss", rope_parameters=angles)
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert tensors_of(tmp_path / "x.gguf")[0]["gpt-oss.rope.scaling.factor"] == 32


def test_a_folder_that_seqblocks_saved(tmp_path: Path) -> None:
    """It gives the same file, unless its spec was changed."""
    saved(tmp_path / "model", "qwen3")
    to_gguf(tmp_path / "model", tmp_path / "direct.gguf")
    for name, values in (("ours", {"cache": 64}), ("changed", {"dim": 64, "cache": 64})):
        seqblocks.save(seqblocks.from_pretrained(tmp_path / "model", set=values), tmp_path / name)
    to_gguf(tmp_path / "ours", tmp_path / "ours.gguf")
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()
    with pytest.raises(RunError, match=r"dim of its spec has another value than its config\.json says"):
        to_gguf(tmp_path / "changed", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("case", "kind", "official"),
    [
        ("qwen3_5_text", "qwen3_5", "model.language_model."),
        ("gemma3_text", "gemma3", "language_model.model."),
    ],
)
def test_the_language_model_of_a_model_that_reads_images(case: str, kind: str, official: str, tmp_path: Path) -> None:
    """It gives the same file as the language model alone."""
    saved(tmp_path / "alone", case)
    (tmp_path / "model").mkdir()
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    outside = {"model_type": kind, "tie_word_embeddings": config["tie_word_embeddings"], "text_config": config}
    (tmp_path / "model" / "config.json").write_text(json.dumps(outside))
    weights = safetensors.load_file(tmp_path / "alone" / "model.safetensors")
    renamed = {re.sub(r"^model\.", official, name): x for name, x in weights.items()}
    safetensors.save_file(renamed, tmp_path / "model" / "model.safetensors")
    for name in ("alone", "model"):
        to_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()


def test_a_head_that_differs_from_the_embedding_is_written(tmp_path: Path) -> None:
    """transformers ignores `tie_word_embeddings` then."""
    model = saved(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert torch.equal(tensors_of(tmp_path / "x.gguf")[1]["output.weight"], model.lm_head.weight)


def test_smaller_types(tmp_path: Path) -> None:
    """Routers, convolutions and norms stay exact; experts are stored as other matrices are."""
    saved(tmp_path / "model", "kimi_linear")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf", dtype="q8_0")
    types = tensors_of(tmp_path / "x.gguf")[2]
    exact = ("ffn_gate_inp.weight", "ssm_conv1d_q.weight", "attn_norm.weight", "ssm_dt.bias", "exp_probs_b.bias")
    for name, kind in types.items():
        short = name.removeprefix("blk.").partition(".")[2]
        if short in exact:
            assert kind == "F32", name
    smaller = {types[f"blk.1.{name}"] for name in ("ffn_gate_exps.weight", "attn_output.weight", "attn_v_b.weight")}
    assert smaller == {"Q8_0"}
    assert types["blk.1.attn_k_b.weight"] == "F16"  # its rows have 16 values
