"""GPT-NeoX, such as Pythia, from the config.json of transformers."""

from __future__ import annotations

from seqblocks.checkpoint.families.dense import residual
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    head_of,
    number,
    require,
    scalar,
    std_of,
    whole,
)

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "relu": "relu", "silu": "silu"}  # fmt: skip
OURS, OFFICIAL = "layers.{layer}", "gpt_neox.layers.{layer}"


def gpt_neox(config: Config) -> str:
    """Write a GPT-NeoX language model (arXiv:2204.06745): attention and network in parallel, or in sequence."""
    require(config, hidden_act=(*ACTIVATIONS, None), attention_dropout=(0.0, 0, None), hidden_dropout=(0.0, 0, None))
    require(config, attention_dropout_prob=(0.0, 0, None), hidden_dropout_prob=(0.0, 0, None))  # their older names
    eps, std, bias = above_0(config, "layer_norm_eps", 1e-5), std_of(config), flag(config, "attention_bias", True)
    heads, head, hidden = whole(config, "num_attention_heads"), head_of(config), whole(config, "intermediate_size")
    share = number(config, "rotary_pct", 0.25)
    rotary = rope(config, head, number(config, "rotary_emb_base", 10000), part=share).text

    def linear(features: int | str, name: str, has_bias: bool = True, source: str = "") -> str:
        zero = ", bias: zeros" if has_bias else ""
        drawn = f'bias: {scalar(has_bias)}, init: {{weight: "{normal(std)}"{zero}}}'
        return f"- linear: {{{source}features: {features}, {drawn}, name: {name}}}"

    norm = f"- layer_norm: {{gain: plain, bias: true, eps: {scalar(eps)}, name: norm"
    attention = [
        f"{norm}, as: read}}",
        linear("dim", "q", bias, "from: read, "), f"- rotary: {{heads: {heads}, {rotary}, as: turned_q}}",
        linear("dim", "k", bias, "from: read, "), f"- rotary: {{heads: {heads}, {rotary}, as: turned_k}}",
        linear("dim", "v, as: v", bias, "from: read, "),
        f"- attention: {{q: turned_q, k: turned_k, v: v, heads: {heads}, cache: cache}}",
        linear("dim", "dense", bias),
    ]  # fmt: skip
    network = [
        f"{norm}}}", linear(hidden, "dense_h_to_4h"), f"- {ACTIVATIONS[config.get('hidden_act') or 'gelu']}",
        linear("dim", "dense_4h_to_h"),
    ]  # fmt: skip
    if flag(config, "use_parallel_residual", True):
        both = [*_branch("attention", attention), *_branch("mlp", network)]
        layer = residual("both", ["- parallel:", "    name: sum", "    branches:", *both])
        prefix = f"{OURS}.both.sum."
    else:
        layer, prefix = f"{residual('attention', attention)}\n{residual('mlp', network)}", f"{OURS}."
    names = [f"{prefix}attention.norm: {OFFICIAL}.input_layernorm"]
    names.append(f"{prefix}mlp.norm: {OFFICIAL}.post_attention_layernorm")
    for kind in ("weight", "bias")[: 1 + bias]:
        whole_name = f"{OFFICIAL}.attention.query_key_value.{kind}"
        for at, name in enumerate("qkv"):
            names.append(
                f'{prefix}attention.{name}.{kind}: {{slice: "{whole_name}", start: {at * head}, groups: {heads}}}'
            )
    names += [f"{prefix}attention.dense: {OFFICIAL}.attention.dense"]
    names += [f"{prefix}mlp.{name}: {OFFICIAL}.mlp.{name}" for name in ("dense_h_to_4h", "dense_4h_to_h")]
    model = language(config, "GPT-NeoX language model", [], eps)._replace(
        norm=f"layer_norm: {{name: norm, gain: plain, bias: true, eps: {scalar(eps)}}}",
        names=("gpt_neox.embed_in", "gpt_neox.final_layer_norm"), head="embed_out",
    )  # fmt: skip
    return model.text(["full"] * depth_of(config), {"full": layer}, "\n".join(names) + "\n")


def _branch(name: str, steps: list[str]) -> list[str]:
    return [f"      - {name}:", *(f"          {step}" for step in steps)]
