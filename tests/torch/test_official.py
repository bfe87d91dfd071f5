"""Every bundled `checkpoint:` map against names, shapes and values of the releases that it reads (tests/golden/hub)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.analysis.checkpoint_maps.translation import official_name
from seqblocks.checkpoint import load_official
from seqblocks.checkpoint.official import translated
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled

FOLDER = Path(__file__).parent.parent / "golden" / "hub"


def official_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return names and shapes by `model layout`."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    for line in (FOLDER / "official_names.txt").read_text().splitlines():
        if line.startswith("# "):
            here = out.setdefault(line[2:], {})
            continue
        name, *sizes = line.split()
        before, _, rest = name.partition("{")
        runs, _, after = rest.partition("}")
        layers: list[Any] = []
        for run in filter(None, runs.split(",")):
            first, _, last = run.partition("-")
            layers += range(int(first), int(last or first) + 1)
        here |= {f"{before}{layer}{after}": tuple(map(int, sizes)) for layer in layers or [""]}
    return out


SHAPES = official_shapes()


LARGER = (  # sizes of models of which the tests that are not slow have the smallest
    "mamba_370m", "mamba_790m", "mamba_1_4b", "mamba_2_8b", "mamba2_370m", "mamba2_780m", "mamba2_1_3b", "mamba2_2_7b",
    "vil_small", "vil_base", "vil2_small", "vil2_base", "vim_small", "vim_base", "xlstm_1_3b", "xlstm_1_3b_7_1",
)  # fmt: skip


def marked(cases: Iterable[str], mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Return the cases in order, those of larger sizes marked."""
    return [pytest.param(x, marks=mark if x.split()[0] in LARGER else ()) for x in sorted(cases)]


def without_memory(case: str, numbers: dict[str, float]) -> dict[str, Tensor]:
    """Return tensors that share one stored number each; a tied head is the embedding's tensor."""
    out = {name: torch.tensor(numbers[name]).expand(shape) for name, shape in SHAPES[case].items()}
    if case.startswith(("mamba", "recurrentgemma", "gemma", "lfm2", "ttt")):
        out["lm_head.weight"] = out[next(name for name in out if "embed" in name)]
    return out


def parameters_from(spec: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters, converted all at once."""
    ours, left_out = translated(spec, Weights(tensors, tensors.__getitem__))
    assert not any(left_out)
    return {name: ours.read(name) for name in ours.headers}


@pytest.mark.slow
def test_every_bundled_map_has_its_official_names() -> None:
    models = {name: check.load_model(name) for name, path in bundled().items() if path.parent.name == "models"}
    assert {name.split()[0] for name in SHAPES} == {name for name, model in models.items() if model.checkpoint}


@pytest.mark.parametrize("case", sampled(marked(SHAPES), every=6))
def test_every_parameter_has_its_tensor_and_every_tensor_its_parameter(case: str) -> None:
    """Each tensor stores a single distinct number, which identifies the tensor that a parameter was read from."""
    model = check.load_model(case.split()[0])
    shapes = SHAPES[case]
    numbers = {name: float(at) for at, name in enumerate(shapes)}
    tensors = without_memory(case, numbers)
    tied = {item.tied for item in graph.parameters(model.graph) if item.tied}
    made = parameters_from(model, tensors)
    # There are as many tensors as parameters, except for the tied head and for parameters that the sLSTM, RWKV-6,
    # latent attention and the four orders of VMamba store in one tensor.
    together = 3 * sum(name.endswith("slstm_cell._bias_") for name in shapes)
    together += 4 * sum(name.endswith(("x_bias", "x_proj.2.weight")) for name in shapes)
    together += sum(name.endswith(("kv_a_proj_with_mqa.weight", "kv_b_proj.weight")) for name in shapes)
    stacked = ("x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds")
    together += 3 * sum(name.endswith(stacked) for name in shapes)
    assert len(made) == len(shapes) - len(tied) + together
    sources: dict[float, list[str]] = {}
    for name, tensor in made.items():
        sources.setdefault(tensor.flatten()[0].item(), []).append(name)
    parts = r"\.cell\.[ifzo]_bias$|\.mix_[rwkvg]\.(weight|bias)$|\.(kv_a_proj\.|k_common\.|k_|v_)weight$"
    parts += r"|\.scan\.(rows|columns)(_reverse)?\."
    for names in sources.values():
        assert len(names) == 1 or all(re.search(parts, name) for name in names), names


@pytest.mark.parametrize("case", sampled(marked(SHAPES), every=6))
def test_one_tensor_more_or_less_or_of_another_shape_is_an_error(case: str) -> None:
    model = check.load_model(case.split()[0])
    tensors = without_memory(case, dict.fromkeys(SHAPES[case], 0.0))
    chosen = ("mixer.D", "igate.bias", "igate_preact.bias", "o_proj.weight", "linear_out.bias", "conv.conv.weight")
    chosen += ("time_decay", "head.bias", "classifier.2.bias", "final_layer.linear.bias")  # of RWKV-4, images
    victim = next(name for name in tensors if name.endswith(chosen))
    with pytest.raises(seqblocks.RunError, match=f"have no {re.escape(victim)}, needed for"):
        parameters_from(model, {name: t for name, t in tensors.items() if name != victim})
    with pytest.raises(seqblocks.RunError, match="contain tensors that the spec does not map: more"):
        parameters_from(model, {**tensors, "more": torch.zeros(1)})
    with pytest.raises(seqblocks.RunError, match=r" is \[3\], but \["):
        parameters_from(model, {**tensors, victim: torch.zeros(3)})


def mamba_of(config: dict[str, Any]) -> Any:
    """Return the bundled model with the sizes of a transformers configuration."""
    block, rank = "model.layers.mamba_block.", config["time_step_rank"]
    text, _, _ = check.locate("mamba_130m")
    changes: dict[str, Any] = {
        "dim": config["hidden_size"], "depth": config["num_hidden_layers"], "vocabulary": config["vocab_size"],
        f"{block}state": config["state_size"], f"{block}expand": config["expand"], f"{block}rank": rank,
        f"{block}kernel": config["conv_kernel"], f"{block}bias": config["use_bias"],
        f"{block}conv_bias": config["use_conv_bias"], f"{block}eps": config["layer_norm_epsilon"],
        "model.norm_f.eps": config["layer_norm_epsilon"],
    }  # fmt: skip
    if not config["tie_word_embeddings"]:
        text = text.replace("unembed: {bias: false, tie: embed}", "unembed: {bias: false}")
    return seqblocks.build_text(text, set=changes).eval()


def close(found: Tensor, expected: Tensor) -> None:
    """Compare float32 sums in another order: four roundings of 1.2e-7 for each of 17 tokens, relative to the largest
    logit."""
    assert (found - expected).abs().max() <= 17 * 4 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize("layout", ["transformers", "mamba_ssm"])
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_the_bundled_mamba_gives_the_logits_of_transformers(variant: str, layout: str) -> None:
    with np.load(FOLDER / f"mamba_{variant}.npz") as file:
        data = dict(file)
    model = mamba_of(json.loads(str(data["meta"]))["config"])
    tensors = {key[2:]: torch.from_numpy(data[key]) for key in data if key.startswith("w/")}
    if layout == "mamba_ssm":
        tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    if variant == "tied":
        del tensors["lm_head.weight"]  # as stored in a safetensors file
    load_official(model, tensors)
    with torch.no_grad():
        close(model(torch.from_numpy(data["in/input_ids"])), torch.from_numpy(data["out/logits"]))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_live_models_of_transformers_give_the_same_logits(tied: bool, biases: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")
    torch.manual_seed(3)
    options = {"use_bias": biases, "use_conv_bias": not biases, "tie_word_embeddings": tied}
    config = transformers.MambaConfig(vocab_size=40, hidden_size=20, num_hidden_layers=3, **options)
    peer = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = mamba_of(config.to_dict())
    load_official(model, peer.state_dict())
    ids = torch.randint(0, 40, (2, 17))
    with torch.no_grad():
        close(model(ids), peer(ids).logits)


DEPTHS = {"vil_tiny": 2, "vil2_tiny": 1, "vim_tiny": 1, "vil_digits": 2, "vil_tiny_four_orders": 4, "mamba_130m": 1}


@pytest.mark.parametrize(("name", "depth"), DEPTHS.items())
def test_the_smallest_depth_works(name: str, depth: int) -> None:
    """The rate of drop_path grows over the layers, from 0 if there is only one."""
    changes: dict[str, Any] = {"depth": depth, "drop_path": 0.2} if name.startswith("vi") else {"depth": depth}
    model = check.load_model(name, set=changes)
    rates = [node.arguments.drop_path for node in graph.walk(model.graph) if node.kind == "residual"]
    assert rates[0] == 0.0
    assert len(rates) == depth or name == "vil2_tiny"


def test_maps_with_a_name() -> None:
    """With `llama` for the layers, the names and shapes are those of transformers' LlamaForCausalLM."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        expected = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    text = """
    seqblocks: 1
    use: [hybrids, attention]
    model:
      input: {tokens: 11}
      steps:
        - embed: 16
        - repeat:
            name: layers
            times: 2
            steps:
              - decoder_layer:
                  mixer: [{attention_mixer: {dim: 16, heads: 4, kv_heads: 2}}]
                  network: [{swiglu: {hidden: 24}}]
        - rms_norm: {name: norm}
        - unembed: {bias: false}
    checkpoint:
      embed: model.embed_tokens
      layers.{layer}.decoder_layer: {layout: llama, at: "model.layers.{layer}"}
      norm: model.norm
      unembed: lm_head
    """
    _, model = seqblocks.load_text(text)
    assert model
    own = {item.name: item.parameter.shape for item in graph.parameters(model.graph)}
    assert {official_name(model, name): shape for name, shape in own.items()} == expected
    steps = "{linear: {features: 4, name: q}}, {linear: {features: 4, name: k}}, {linear: {features: 4, name: out}}"
    text = f"""
    seqblocks: 1
    blocks: {{mixer: {{steps: [{steps}], checkpoint: {{}}}}}}
    model: {{input: {{features: 4}}, steps: [{{mixer: {{name: a}}}}, {{swiglu: {{hidden: 6, bias: true}}}}]}}
    checkpoint: {{a: {{layout: gqa, at: self_attn}}, swiglu: {{layout: swiglu_w123}}}}
    """
    _, model = seqblocks.load_text(text)
    assert model
    layers = [f"self_attn.{step}_proj" for step in "qko"] + ["w1", "w2", "w3"]
    names = sorted(official_name(model, item.name) for item in graph.parameters(model.graph))
    assert names == sorted(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))


def test_a_map_with_a_name_has_alternatives() -> None:
    """All names of a file are below the same alternative, or below different ones."""
    text = """
    seqblocks: 1
    model: {input: {features: 4}, steps: [{swiglu: {hidden: 6}}]}
    checkpoint: {swiglu: {layout: swiglu, at: [mlp, backbone.mlp]}}
    """
    model = seqblocks.build_text(text, seed=0)
    for starts in (("mlp",) * 3, ("backbone.mlp",) * 3, ("mlp", "backbone.mlp", "mlp")):
        kinds = zip(starts, ("gate", "up", "down"), model.parameters(), strict=True)
        tensors = {f"{start}.{kind}_proj.weight": torch.randn_like(p) for start, kind, p in kinds}
        seqblocks.checkpoint.load_official(model, tensors)
        for loaded, given in zip(model.parameters(), tensors.values(), strict=True):
            assert torch.equal(loaded, given)
