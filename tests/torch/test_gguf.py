"""GGUF files: the tensors and metadata that llama.cpp reads, and the reasons why other models are refused.

benchmarks/gguf_logits.py compares logits with llama.cpp itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import seqblocks
from seqblocks.checkpoint import to_gguf
from seqblocks.checkpoint.families import spec_text
from seqblocks.cli.main import main
from seqblocks.errors import RunError
from seqblocks.language.spec_files import bundled

gguf = pytest.importorskip("gguf", reason="an optional extra; the test extra installs it")

SIZES = {"dim": 32, "depth": 2, "vocabulary": 48}
EXTRA = {
    "mamba_130m": {},
    "mamba2_130m": {"state": 16, "head": 16},
    "rwkv7_0_4b": {"dim": 64, "depth": 3, "decay_rank": 8, "erase_rank": 12, "value_rank": 16, "gate_rank": 20},
}


def saved(folder: Path, name: Any, **values: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a small model whose parameters are all random. Returns its folder and its parameters."""
    build = seqblocks.build_text if "\n" in str(name) else seqblocks.build
    model = build(name, set=values)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    seqblocks.save(model, folder / "model")
    return folder / "model", dict(model.state_dict())


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the tensors of a GGUF file."""
    reader = gguf.GGUFReader(file)
    return {name: each.contents() for name, each in reader.fields.items()}, {each.name: each for each in reader.tensors}


def values(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(numpy.array(gguf.dequantize(tensor.data, tensor.tensor_type)))


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders above it are created; nothing is left of a file that does not fit on the disk."""
    folder, _ = saved(tmp_path, "mamba_130m", **SIZES)
    to_gguf(folder, tmp_path / "new" / "folder" / "x.gguf")
    assert (tmp_path / "new" / "folder" / "x.gguf").exists()
    command = ["convert", str(folder), "--to", "gguf", "--out"]
    for file in (folder / "spec.yaml" / "x.gguf", tmp_path / ("x" * 250)):
        assert main([*command, str(file)]) == 2
        assert f"error: {file} cannot be written: " in capsys.readouterr().err

    def full(*_: Any) -> None:
        raise OSError("100 requested and 60 written")  # as NumPy does, without a number

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    assert main([*command, str(tmp_path / "x.gguf")]) == 4
    assert f"{tmp_path / 'x.gguf'} cannot be written: No space left on device. Free" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "new"]


@pytest.mark.parametrize(("kind", "value"), [("f16", 1e5), ("q8_0", 1e7), ("q8_0", float("nan"))])
def test_values_that_a_type_cannot_hold(tmp_path: Path, kind: str, value: float) -> None:
    """The first two would become infinite, and the last any number."""
    model = seqblocks.build("mamba_130m", set=SIZES)
    with torch.no_grad():
        model.embed.weight[3, 4] = -value
    seqblocks.save(model, tmp_path / "model")
    with pytest.raises(RunError, match=rf"token_embd\.weight has values up to .*, and {kind} holds up to .*: use f32"):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf", dtype=kind)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")


def test_a_file_of_mamba(tmp_path: Path) -> None:
    folder, ours = saved(tmp_path, "mamba_130m", **SIZES)
    summary = to_gguf(folder, tmp_path / "x.gguf")
    metadata, tensors = read(tmp_path / "x.gguf")
    assert summary == ("mamba", len(tensors), (tmp_path / "x.gguf").stat().st_size)
    expected = {
        "general.architecture": "mamba", "general.file_type": 0, "mamba.embedding_length": 32, "mamba.block_count": 2,
        "mamba.ssm.inner_size": 64, "mamba.ssm.state_size": 16, "mamba.ssm.conv_kernel": 4,
        "mamba.ssm.time_step_rank": 2, "mamba.vocab_size": 48, "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0, "mamba.context_length": 2**20, "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    assert expected.items() <= metadata.items()
    assert metadata["mamba.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    wanted = {"token_embd.weight": ours["embed.weight"], "output_norm.weight": ours["norm_f.weight"]}
    for layer in range(2):
        block = f"layers.{layer}.mamba_block.residual"
        own = {name.removeprefix(f"{block}."): x for name, x in ours.items() if name.startswith(block)}
        wanted |= {
            f"blk.{layer}.attn_norm.weight": own["norm.weight"],
            f"blk.{layer}.ssm_in.weight": own["mixer.in_proj.weight"],
            f"blk.{layer}.ssm_conv1d.weight": own["mixer.conv1d.weight"][:, 0],
            f"blk.{layer}.ssm_conv1d.bias": own["mixer.conv1d.bias"],
            f"blk.{layer}.ssm_x.weight": own["mixer.x_proj.weight"],
            f"blk.{layer}.ssm_dt.weight": own["mixer.dt_proj.weight"],
            f"blk.{layer}.ssm_dt.bias": own["mixer.dt_proj.bias"],
            f"blk.{layer}.ssm_a": -own["mixer.ssm.A_log"].exp(),
            f"blk.{layer}.ssm_d": own["mixer.ssm.D"],
            f"blk.{layer}.ssm_out.weight": own["mixer.out_proj.weight"],
        }
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(values(tensors[name]), tensor), name
        assert [int(size) for size in tensors[name].shape] == [*reversed(tensor.shape)], name  # as in ggml


def test_a_file_of_mamba2(tmp_path: Path) -> None:
    folder, ours = saved(tmp_path, "mamba2_130m", **SIZES | EXTRA["mamba2_130m"])
    to_gguf(folder, tmp_path / "x.gguf")
    metadata, tensors = read(tmp_path / "x.gguf")
    expected = {
        "general.architecture": "mamba2", "mamba2.ssm.inner_size": 64, "mamba2.ssm.state_size": 16,
        "mamba2.ssm.time_step_rank": 4, "mamba2.ssm.group_count": 1, "mamba2.ssm.conv_kernel": 4,
    }  # fmt: skip
    assert expected.items() <= metadata.items()
    mixer = "layers.1.mamba2_block.residual.mixer"
    wanted = {
        "blk.1.ssm_conv1d.weight": ours[f"{mixer}.conv1d.weight"][:, 0],
        "blk.1.ssm_dt.bias": ours[f"{mixer}.rate.bias"],
        "blk.1.ssm_a": -ours[f"{mixer}.decay.A_log"].exp()[:, None],
        "blk.1.ssm_d": ours[f"{mixer}.y.weight"][:, None],
        "blk.1.ssm_norm.weight": ours[f"{mixer}.norm.weight"][None],
        "blk.1.ssm_in.weight": ours[f"{mixer}.in_proj.weight"],
        "blk.1.ssm_out.weight": ours[f"{mixer}.out_proj.weight"],
    }
    for name, tensor in wanted.items():
        assert torch.equal(values(tensors[name]), tensor), name
    assert len(tensors) == 2 + 2 * (2 + len(wanted))  # and a norm and the bias of the convolution in each layer


def test_a_norm_of_several_groups_has_a_row_for_each(tmp_path: Path) -> None:
    config = {
        "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 48, "state_size": 8,
        "n_groups": 2, "num_heads": 4, "head_dim": 16, "expand": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    model = seqblocks.build_text(spec_text(config))
    seqblocks.save(model, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    metadata, tensors = read(tmp_path / "x.gguf")
    assert metadata["mamba2.ssm.group_count"] == 2
    assert values(tensors["blk.0.ssm_norm.weight"]).shape == (2, 32)
    assert torch.equal(values(tensors["output.weight"]), model.state_dict()["unembed.weight"])  # it is not tied


def test_a_file_of_rwkv7(tmp_path: Path) -> None:
    folder, ours = saved(tmp_path, "rwkv7_0_4b", **SIZES | EXTRA["rwkv7_0_4b"])
    to_gguf(folder, tmp_path / "x.gguf")
    metadata, tensors = read(tmp_path / "x.gguf")
    expected = {
        "general.architecture": "rwkv7", "rwkv7.embedding_length": 64, "rwkv7.block_count": 3,
        "rwkv7.feed_forward_length": 256, "rwkv7.wkv.head_size": 64, "rwkv7.token_shift_count": 2,
        "rwkv7.attention.decay_lora_rank": 8, "rwkv7.attention.iclr_lora_rank": 12,
        "rwkv7.attention.value_residual_mix_lora_rank": 16, "rwkv7.attention.gate_lora_rank": 20,
        "rwkv7.attention.head_count": 0, "rwkv7.vocab_size": 48,
    }  # fmt: skip
    assert expected.items() <= metadata.items()
    assert metadata["rwkv7.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    wanted = {
        "token_embd.weight": ours["embed.weight"], "output.weight": ours["unembed.weight"],
        "token_embd_norm.weight": ours["pre_norm.weight"], "token_embd_norm.bias": ours["pre_norm.bias"],
        "output_norm.weight": ours["norm.weight"], "output_norm.bias": ours["norm.bias"],
    }  # fmt: skip
    for layer, prefix in enumerate(("", "layers.0.", "layers.1.")):
        own = {name.removeprefix(prefix): x for name, x in ours.items() if name.startswith(prefix)}
        mixes = [own[f"attn.x_{part}.weight"] for part in "rwkvag"]
        low = {"w": "decay", "a": "erase", "v": "value" if layer else "erase"}  # the first layer does not use v
        named = {
            **{f"attn_norm.{part}": own[f"attn_norm.{part}"] for part in ("weight", "bias")},
            **{f"attn_norm_2.{part}": own[f"ffn.norm.{part}"] for part in ("weight", "bias")},
            **{f"time_mix_ln.{part}": own[f"attn.memory.g_norm.{part}"] for part in ("weight", "bias")},
            "time_mix_lerp_fused.weight": torch.stack(mixes)[:, None, None],
            "time_mix_receptance.weight": own["attn.r_proj.weight"],
            "time_mix_key.weight": own["attn.k_proj.weight"],
            "time_mix_value.weight": own["attn.v_proj.weight"],
            "time_mix_output.weight": own["attn.o_proj.weight"],
            **{f"time_mix_{part}0.weight": own[f"attn.{name}_out.bias"] for part, name in low.items()},
            **{f"time_mix_{part}1.weight": own[f"attn.{name}_in.weight"] for part, name in low.items()},
            **{f"time_mix_{part}2.weight": own[f"attn.{name}_out.weight"] for part, name in low.items()},
            "time_mix_g1.weight": own["attn.gate_in.weight"],
            "time_mix_g2.weight": own["attn.gate_out.weight"],
            **{f"time_mix_{part}.weight": own[f"attn.memory.{part}.weight"] for part in ("k_k", "k_a", "r_k")},
            "channel_mix_lerp_k.weight": own["ffn.rwkv7_channel_mixer.x_k.weight"],
            "channel_mix_key.weight": own["ffn.rwkv7_channel_mixer.key.weight"],
            "channel_mix_value.weight": own["ffn.rwkv7_channel_mixer.value.weight"],
        }
        wanted |= {f"blk.{layer}.{name}": x for name, x in named.items()}
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(values(tensors[name]), tensor), name
        assert [int(size) for size in tensors[name].shape] == [*reversed(tensor.shape)], name


RWKV6 = """seqblocks: 1
use: [rwkv6]
model:
  input: {tokens: 48}
  steps:
    - embed: {features: 64}
    - layer_norm: {name: pre_norm}
    - repeat:
        name: layers
        times: 2
        steps:
          - residual:
              name: token
              steps:
                - layer_norm: {name: norm}
                - rwkv6_mixer: {dim: 64, heads: 2, expand_k: 1, mix_rank: 3, decay_rank: 5, eps: 64e-5}
          - residual:
              name: channel
              steps: [{layer_norm: {name: norm}}, {rwkv6_channel_mixer: {dim: 64, ratio: 2}}]
    - layer_norm: {name: norm}
    - unembed: {bias: false}
"""


def test_a_file_of_rwkv6(tmp_path: Path) -> None:
    folder, ours = saved(tmp_path, RWKV6)
    to_gguf(folder, tmp_path / "x.gguf")
    metadata, tensors = read(tmp_path / "x.gguf")
    expected = {
        "general.architecture": "rwkv6", "rwkv6.embedding_length": 64, "rwkv6.block_count": 2,
        "rwkv6.feed_forward_length": 128, "rwkv6.wkv.head_size": 32, "rwkv6.token_shift_count": 2,
        "rwkv6.time_mix_extra_dim": 3, "rwkv6.time_decay_extra_dim": 5, "rwkv6.rescale_every_n_layers": 0,
        "rwkv6.attention.head_count": 0, "rwkv6.vocab_size": 48,
    }  # fmt: skip
    assert expected.items() <= metadata.items()
    assert metadata["rwkv6.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    wanted = {"token_embd.weight": ours["embed.weight"], "output.weight": ours["unembed.weight"]}
    for part in ("weight", "bias"):
        wanted |= {f"token_embd_norm.{part}": ours[f"pre_norm.{part}"], f"output_norm.{part}": ours[f"norm.{part}"]}
    for layer in range(2):
        mixer, channel = (f"layers.{layer}.{part}." for part in ("token.rwkv6_mixer", "channel.rwkv6_channel_mixer"))
        r, w, k, v, g = ours[f"{mixer}mix_in.weight"].chunk(5)
        named = {
            **{f"attn_norm.{part}": ours[f"layers.{layer}.token.norm.{part}"] for part in ("weight", "bias")},
            **{f"attn_norm_2.{part}": ours[f"layers.{layer}.channel.norm.{part}"] for part in ("weight", "bias")},
            **{f"time_mix_ln.{part}": ours[f"{mixer}g_norm.{part}"] for part in ("weight", "bias")},
            "time_mix_lerp_x.weight": ours[f"{mixer}mix.weight"],
            "time_mix_w1.weight": torch.cat([w, k, v, r, g]),
            "time_mix_w2.weight": torch.stack([ours[f"{mixer}mix_{part}.weight"] for part in "wkvrg"]),
            **{f"time_mix_lerp_{part}.weight": ours[f"{mixer}mix_{part}.bias"] for part in "wkvrg"},
            "time_mix_receptance.weight": ours[f"{mixer}r_proj.weight"],
            "time_mix_key.weight": ours[f"{mixer}k_proj.weight"],
            "time_mix_value.weight": ours[f"{mixer}v_proj.weight"],
            "time_mix_gate.weight": ours[f"{mixer}g_proj.weight"],
            "time_mix_output.weight": ours[f"{mixer}o_proj.weight"],
            "time_mix_decay_w1.weight": ours[f"{mixer}decay_in.weight"],
            "time_mix_decay_w2.weight": ours[f"{mixer}decay_out.weight"],
            "time_mix_decay.weight": ours[f"{mixer}decay_out.bias"],
            "time_mix_first.weight": ours[f"{mixer}linear_attention.u"],
            **{f"channel_mix_lerp_{part}.weight": ours[f"{channel}mix_{part}.weight"] for part in "kr"},
            "channel_mix_key.weight": ours[f"{channel}key.weight"],
            "channel_mix_value.weight": ours[f"{channel}value.weight"],
            "channel_mix_receptance.weight": ours[f"{channel}receptance.weight"],
        }
        wanted |= {f"blk.{layer}.{name}": x for name, x in named.items()}
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(values(tensors[name]), tensor), name
        assert [int(size) for size in tensors[name].shape] == [*reversed(tensor.shape)], name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("expand_k: 1,", "expand_k: 0.5,"), r"r_proj \(.*\): features is 32, not 64"),
        (("{name: pre_norm}", "{name: pre_norm, eps: 1e-3}"), r"norm \(.*\): eps is 1e-05, not 0.001"),
    ],
)
def test_variants_of_rwkv6_are_refused_with_the_reason(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    folder, _ = saved(tmp_path, RWKV6.replace(*change))
    with pytest.raises(RunError, match=reason):
        to_gguf(folder, tmp_path / "x.gguf")


def test_a_tied_rwkv7_gets_both_tensors(tmp_path: Path) -> None:
    model = seqblocks.build_text(rwkv7_text(tie_word_embeddings=True))
    seqblocks.save(model, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    _, tensors = read(tmp_path / "x.gguf")
    for name in ("output.weight", "token_embd.weight"):
        assert torch.equal(values(tensors[name]), model.state_dict()["embed.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_smaller_types(tmp_path: Path, name: str, kind: str) -> None:
    folder, _ = saved(tmp_path, name, **SIZES | EXTRA[name])
    for each in ("f32", kind):
        target = str(tmp_path / f"{each}.gguf")
        assert main(["convert", str(folder), "--to", "gguf", "--type", each, "--out", target]) == 0
    _, full = read(tmp_path / "f32.gguf")
    metadata, found = read(tmp_path / f"{kind}.gguf")
    assert metadata["general.file_type"] == {"f16": 1, "q8_0": 7}[kind]
    types = {name.split(".")[-2]: each.tensor_type.name for name, each in found.items() if name.endswith(".weight")}
    rwkv = {"time_mix_lerp_fused", "time_mix_k_k", "time_mix_w0", "time_mix_w1", "time_mix_g2"}
    exact = {"attn_norm"} | (types.keys() & ({"ssm_conv1d"} | rwkv))
    large = {"token_embd"} | (types.keys() & {"ssm_in", "ssm_out", "time_mix_key", "channel_mix_value"})
    assert {types[each] for each in exact} == {"F32"}
    assert {types[each] for each in large} == {kind.upper()}
    assert all(each.tensor_type.name == "F32" for name, each in found.items() if name.endswith("ssm_a"))
    if "ssm_dt" in types:
        assert types["ssm_dt"] == "F16"  # its rows have 2 values, a block of q8_0 has 32
    for name, each in found.items():
        exact, stored = values(full[name]), values(each)
        if each.tensor_type.name == "Q8_0":
            largest = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            # Half a step of the scale, largest / 127, which is stored in float16 (relative error 2^-11).
            bound = (largest / 127 / 2 + largest * 2**-11).expand(*largest.shape[:-1], 32).flatten(-2)
            assert ((exact - stored).abs() <= bound).all(), name
        else:
            wanted = exact.half().float() if each.tensor_type.name == "F16" else exact
            assert torch.equal(stored, wanted), name


def spec(kind: str, arguments: str, eps: float = 1e-5) -> str:
    """Return a small language model of one layer, with further arguments of its block."""
    return f"""seqblocks: 1
use: [{kind}]
model:
  input: {{tokens: 48}}
  steps:
    - embed: {{features: 32}}
    - repeat: {{name: layers, times: 1, steps: [{kind}_block: {{dim: 32, {arguments}}}]}}
    - rms_norm: {{name: norm_f, eps: {eps}}}
    - unembed: {{bias: false, tie: embed}}
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (spec("mamba", "", eps=1e-6), r"norm_f \(.*\): eps is 1e-06, not 1e-05"),
        (spec("mamba", "expand: 3"), r"mamba has 64 inner features at width 32"),
        (spec("mamba", "bias: true"), r"in_proj \(.*\): bias is True, not False"),
        (spec("mamba", "conv_bias: false"), r"conv1d \(.*\): bias is False, not True"),
        (spec("mamba2", "head: 16, gate: after"), r"norm \(.*\): gate is after, not before"),
        (spec("mamba2", "head: 16, dt_least: 0.1"), r"rate \(.*\): least is 0.1, not 0.0"),
        (spec("mamba2", "head: 16, norm: false"), r"no architecture has its steps, which are embed"),
        ("transformer_small", r"no architecture has its steps, which are embed.*writes attention and experts only"),
        ("mlstm_small", "llama.cpp has no xLSTM"),
        ("mingru_small", "llama.cpp has no RecurrentGemma, minGRU or minLSTM"),
        ("vil_small", r"not a language model"),
    ],
)
def test_other_models_are_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    folder, _ = saved(tmp_path, text)
    with pytest.raises(RunError, match=reason):
        to_gguf(folder, tmp_path / "x.gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


SMALL = {"dim": 64, "depth": 1, "vocabulary": 48}
OF_HEADS = {**SMALL, "heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("rwkv7_0_4b", {**SMALL, "depth": 2, "head": 32}, r"g_norm \(.*\): eps is 0.00032, not the 0.00064 of all"),
        ("rwkv6_1_4b", OF_HEADS, r"g_norm \(.*\): eps is 1e-05, not the 0.00064 of all heads"),
        ("rwkv4_169m", SMALL, "of RWKV only versions 6 and 7"),
        ("gla_1_3b", OF_HEADS, "llama.cpp has no GLA, RetNet or HGRN2"),
        ("retnet_1_3b", OF_HEADS, "llama.cpp has no GLA, RetNet or HGRN2"),
        ("hgrn2_1_3b", {**SMALL, "key": 16}, "llama.cpp has no GLA, RetNet or HGRN2"),
        ("gated_deltanet_1_3b", {**OF_HEADS, "head": 16}, "llama.cpp has delta rules only beside attention"),
        ("recurrentgemma_2b", {"dim": 64, "heads": 2, "layers": "r*2 a", "vocabulary": 48}, "no RecurrentGemma"),
        ("jamba_small", {}, "writes attention and experts only with the config"),
        ("qwen3_next_small", {}, "writes attention and experts only with the config"),
        ("kimi_linear_small", {"rounds": 1}, "writes attention and experts only with the config"),
    ],
)
def test_each_other_family_is_refused_with_its_reason(tmp_path: Path, name: str, sizes: Any, reason: str) -> None:
    folder, _ = saved(tmp_path, name, **sizes)
    with pytest.raises(RunError, match=reason):
        to_gguf(folder, tmp_path / "x.gguf")


def rwkv7_text(**entries: Any) -> str:
    """Return the spec of a small RWKV-7 with further entries of its config.json."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 48, "head_dim": 64, "hidden_act": "sqrelu"}
    return spec_text({"model_type": "rwkv7", **config, **entries})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("key_eps: 1e-06", "key_eps: 0.1"), r"erased \(.*\): eps is 0.1, not 1e-24 or 1e-06"),
        (("bias: true", "bias: false"), r"pre_norm \(.*\): bias is False, not True"),
        (("with: first", "with: normed"), r"add \(.*\) reads other values"),
    ],
)
def test_variants_of_rwkv7_are_refused_with_the_reason(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    text = rwkv7_text()
    changed = text.replace(*change)
    assert changed != text
    folder, _ = saved(tmp_path, changed)
    with pytest.raises(RunError, match=reason):
        to_gguf(folder, tmp_path / "x.gguf")


def test_steps_that_read_other_values_are_refused(tmp_path: Path) -> None:
    """The scan's B and C are exchanged: all steps and sizes are those of Mamba."""
    text = bundled()["mamba"].read_text(encoding="utf-8")
    block = text.replace("B: B_in, C: C_in", "B: C_in, C: B_in", 1)
    assert block != text
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    text = spec("mamba", "").replace("use: [mamba]", "use: [mine.yaml]")
    (tmp_path / "model.yaml").write_text(text, encoding="utf-8")
    folder, _ = saved(tmp_path, tmp_path / "model.yaml")
    with pytest.raises(RunError, match=r"ssm \(.*\) reads other values"):
        to_gguf(folder, tmp_path / "x.gguf")


def test_faults_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    folder, _ = saved(tmp_path, "mamba_130m", **SIZES)
    target = str(tmp_path / "x.gguf")
    assert main(["convert", str(folder), "--to", "gguf", "--out", target, "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["tensors"]) == ("gguf", 22)
    assert main(["convert", str(folder), "--to", "gguf", "--out", target]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(folder), "--to", "hub", "--type", "f16", "--out", str(tmp_path / "hub")]) == 2
    assert "--type and --tokenizer are for --to gguf" in capsys.readouterr().err
