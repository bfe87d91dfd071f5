"""Dense transformer decoders from the config.json of transformers: attention and a gated network, each in a residual.

One description, `Decoder`, covers them: which norms there are, whether queries and keys are normalised, what attention
sees, which angles rotate, and how the official file joins matrices.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from seqblocks.checkpoint.families.layers import OFFICIAL, used
from seqblocks.checkpoint.families.rope import Rope, rope
from seqblocks.checkpoint.families.text import language, network_init, normal, scaled
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    numbers,
    require,
    scalar,
    std_of,
    whole,
    whole_or,
    window_of,
    words,
)
from seqblocks.errors import UsageError

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {FULL: "full", SLIDING: "window"}  # our words for the kinds of layers
GELU = "gelu_pytorch_tanh"


class Names(NamedTuple):
    """Official names of the parts of a layer. norms: of queries and keys. gated: of gate, up and down. router: of
    experts."""

    attention: str = "self_attn"
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    network: str = "mlp"
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts: str = "mlp"
    router: str = "gate"


class Experts(NamedTuple):
    """Experts of a network: `top` of `in_all` for each token. normalize: whether the weights of these add up to 1.

    factor: of their sum. more: further arguments of `experts` as YAML.
    """

    in_all: int
    top: int
    hidden: int
    normalize: bool
    factor: float = 1.0
    more: str = ""


class Decoder(NamedTuple):
    """The layers of a decoder.

    bias, bias_out: of the input projections of attention, and of its output projection. each_head, all_heads: whether
    queries and keys are normalised, over the features of each head or of all. gain: of the norms. factor: of the result
    of attention. sinks: whether each head has a learned score of a key without a value. before, after: official names
    of the norms before and after attention and the network; empty: there is none. joined: whether the file stores
    queries, keys and values as one matrix, and both halves of the gated network.
    """

    dim: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    eps: float
    std: float
    bias: bool = False
    bias_out: bool = False
    bias_network: bool = False
    each_head: bool = False
    all_heads: bool = False
    gain: str = "plain"
    activation: str = "silu"
    scale: float = 0.0
    soft_cap: float = 0.0
    factor: float = 1.0
    sinks: bool = False
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] = ("", "")
    joined: bool = False
    official: Names = Names()

    def layer(self, rotary: Rope | None, window: int = 0, experts: Experts | None = None) -> str:
        """Return the steps of a layer as YAML."""
        return f"{self.attention(rotary, window)}\n{self.network(experts)}"

    def attention(self, rotary: Rope | None, window: int) -> str:
        first, last = self._norms(0)
        factor = [scaled(self.factor, "scaled")] * (self.factor != 1.0)
        return residual("attention", [*first, *self.attention_steps(rotary, window), *last, *factor])

    def attention_steps(self, rotary: Rope | None, window: int) -> list[str]:
        """Return the steps between the norms, which read `read`."""
        q, k = self._projected("q", self.heads, rotary), self._projected("k", self.kv_heads, rotary)
        extra = {"scale": self.scale, "soft_cap": self.soft_cap, "window": window}
        more = "".join(f", {name}: {scalar(value)}" for name, value in extra.items() if value)
        if self.sinks:
            more += f', sinks: true, init: {{sinks: "{normal(self.std)}"}}'
        return [
            *q, *k, self.linear(self.kv_heads * self.head, self.bias, "v_proj, as: v", "from: read, "),
            f"- attention: {{q: q, k: k, v: v, heads: {self.heads}, kv_heads: {self.kv_heads}, cache: cache{more}}}",
            self.linear("dim", self.bias_out, "o_proj"),
        ]  # fmt: skip

    def _projected(self, name: str, heads: int, rotary: Rope | None) -> list[str]:
        lines = [self.linear(heads * self.head, self.bias, f"{name}_proj", "from: read, ")]
        if self.each_head or self.all_heads:
            groups = f"groups: {heads}, shared: true, " if self.each_head else ""
            lines.append(f"- rms_norm: {{{groups}gain: {self.gain}, eps: {scalar(self.eps)}, name: {name}_norm}}")
        turned = "identity: {" if rotary is None else f"rotary: {{heads: {heads}, {rotary.text}, "
        return [*lines, f"- {turned}as: {name}}}"]

    def network(self, experts: Experts | None = None) -> str:
        """Return the steps of the network as YAML."""
        first, last = self._norms(1)
        if experts:
            scaled = [f"- scale: {{by: {scalar(experts.factor)}}}"] if experts.factor != 1.0 else []
            steps = [self._experts(experts), *scaled]
        elif self.activation == "silu":
            bias = ", bias: true" if self.bias_network else ""
            steps = [f"- swiglu: {{hidden: {self.hidden}{bias}, init: {network_init(self.std)}}}"]
        else:
            steps = [
                self.linear(self.hidden, False, "gate_proj, as: gate", "from: read, "),
                self.linear(self.hidden, False, "up_proj", "from: read, "),
                f"- gate: {{by: gate, activation: {self.activation}}}",
                self.linear("dim", False, "down_proj"),
            ]
        return residual("mlp", [*first, *steps, *last])

    def _experts(self, given: Experts) -> str:
        inner = f"swiglu: {{hidden: {given.hidden}, init: {network_init(self.std)}}}"
        router = f'init: {{router.weight: "{normal(self.std)}"}}'
        sizes = f"count: {given.in_all}, top: {given.top}, normalize: {scalar(given.normalize)}{given.more}"
        return f"- experts: {{{sizes}, {router}, steps: [{{{inner}}}]}}"

    def _norms(self, at: int) -> tuple[list[str], list[str]]:
        """Return the step before a part, whose result is `read`, and the step after it."""
        norm = f"rms_norm: {{gain: {self.gain}, eps: {scalar(self.eps)}, name: "
        first = f"- {norm}norm, as: read}}" if self.before[at] else "- identity: {as: read}"
        return [first], [f"- {norm}post_norm}}"] if self.after[at] else []

    def linear(self, features: int | str, bias: bool, name: str, source: str = "") -> str:
        """Return the step of a linear map as YAML. source: a key `from`, followed by a comma."""
        zero = ", bias: zeros" if bias else ""
        drawn = f'bias: {scalar(bias)}, init: {{weight: "{normal(self.std)}"{zero}}}'
        return f"- linear: {{{source}features: {features}, {drawn}, name: {name}}}"

    def names(self, dense: bool = True, experts: bool = False) -> str:
        """Return the lines of a map from our names to the official ones. dense, experts: the networks that exist."""
        ours, lines, official = "layers.{layer}", [], self.official
        for at, part in enumerate(("attention", "mlp")):
            norms = (("norm", self.before[at]), ("post_norm", self.after[at]))
            lines += [f"{ours}.{part}.{own}: {OFFICIAL}.{theirs}" for own, theirs in norms if theirs]
        lines += self._attention_names(f"{ours}.attention", f"{OFFICIAL}.{official.attention}")
        if dense:
            lines += self._network_names(f"{ours}.mlp", f"{OFFICIAL}.{official.network}")
        if experts:
            own, theirs = f"{ours}.mlp.experts", f"{OFFICIAL}.{official.experts}"
            lines.append(f"{own}.router: {theirs}.{official.router}")
            lines += self._gated(f"{own}.{{expert}}.swiglu", f"{theirs}.experts.{{expert}}", False)
        return "\n".join(lines) + "\n"

    def attention_names(self) -> list[str]:
        """Return the lines of a map for attention and the norm before it."""
        ours = "layers.{layer}.attention"
        norm = f"{ours}.norm: {OFFICIAL}.{self.before[0]}"
        return [norm, *self._attention_names(ours, f"{OFFICIAL}.{self.official.attention}")]

    def _attention_names(self, ours: str, theirs: str) -> list[str]:
        projections, official = ["q_proj", "k_proj", "v_proj"], self.official
        if self.joined:
            sizes = [self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head]
            lines = [
                f"{ours}.{name}.weight: {{slice: \"{theirs}.qkv_proj.weight\", start: {sum(sizes[:at])}}}"
                for at, name in enumerate(projections)
            ]
        else:
            lines = [f"{ours}.{name}: {theirs}.{name}" for name in projections]
        lines.append(f"{ours}.o_proj: {theirs}.{official.out}")
        if self.sinks:
            lines.append(f"{ours}.attention.sinks: {theirs}.sinks")
        if self.each_head or self.all_heads:
            pairs = zip(("q_norm", "k_norm"), official.norms, strict=True)
            lines += [f"{ours}.{own}: {theirs}.{name}" for own, name in pairs]
        return lines

    def _network_names(self, ours: str, theirs: str) -> list[str]:
        if self.activation != "silu":
            pairs = zip(("gate_proj", "up_proj", "down_proj"), self.official.gated, strict=True)
            return [f"{ours}.{own}: {theirs}.{name}" for own, name in pairs]
        if not self.joined:
            return self._gated(f"{ours}.swiglu", theirs, self.bias_network)
        halves = (("gate", 0), ("up", self.hidden))
        lines = [
            f"{ours}.swiglu.{name}_weight: {{slice: \"{theirs}.gate_up_proj.weight\", start: {start}}}"
            for name, start in halves
        ]
        return [*lines, f"{ours}.swiglu.down_weight: {theirs}.down_proj.weight"]

    def _gated(self, ours: str, theirs: str, bias: bool) -> list[str]:
        pairs = list(zip(("gate", "up", "down"), self.official.gated, strict=True))
        kinds = ("weight", "bias")[: 1 + bias]
        return [f"{ours}.{own}_{kind}: {theirs}.{name}.{kind}" for kind in kinds for own, name in pairs]


def residual(name: str, steps: list[str]) -> str:
    """Return a residual branch as YAML."""
    lines = "\n".join(f"      {step}" for step in steps)
    return f"- residual:\n    name: {name}\n    steps:\n{lines}"


def decoder(config: Config, kv_default: int = 0, head_default: int = 0, eps: float = 1e-6) -> Decoder:
    """Return what most configs store under the same names. The defaults are those of the family (0: as usual)."""
    heads, dim = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    return Decoder(
        dim, heads, whole_or(config, "num_key_value_heads", kv_default or heads),
        whole_or(config, "head_dim", head_default or dim // heads), whole(config, "intermediate_size"),
        above_0(config, "rms_norm_eps", eps), std_of(config),
    )  # fmt: skip


def _written(
    config: Config, about: str, layers: list[str], kinds: dict[str, str], parts: Decoder, *, tied: bool = False,
    before: str = "", after: str = "",
) -> str:
    model = language(config, about, [], parts.eps, gain=parts.gain, tied=tied)._replace(before=before, after=after)
    return model.text(layers, used(kinds, layers), parts.names())


def _uniform(config: Config, about: str, parts: Decoder, window: int = 0) -> str:
    """Write a model whose layers are all the same."""
    rotary = rope(config, parts.head)
    return _written(config, about, ["full"] * depth_of(config), {"full": parts.layer(rotary, window)}, parts)


def llama(config: Config) -> str:
    """Write a Llama language model (arXiv:2302.13971, 2407.21783)."""
    require(config, hidden_act="silu")
    bias, network = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    parts = decoder(config)._replace(bias=bias, bias_out=bias, bias_network=network)
    return _uniform(config, "Llama language model", parts)


def mistral(config: Config) -> str:
    """Write a Mistral language model (arXiv:2310.06825)."""
    require(config, hidden_act="silu")
    return _uniform(config, "Mistral language model", decoder(config, 8), window_of(config, 4096))


def qwen2(config: Config) -> str:
    """Write a Qwen2 or Qwen2.5 language model (arXiv:2407.10671): biases of queries, keys and values."""
    return _qwen(config, "Qwen2 language model", decoder(config, 32)._replace(bias=True))


def qwen3(config: Config) -> str:
    """Write a Qwen3 language model (arXiv:2505.09388): norms of each head's queries and keys."""
    bias = flag(config, "attention_bias", False)
    parts = decoder(config, 32, 128)._replace(each_head=True, bias=bias, bias_out=bias)
    return _qwen(config, "Qwen3 language model", parts)


def _qwen(config: Config, about: str, parts: Decoder) -> str:
    require(config, hidden_act="silu")
    depth, window = depth_of(config), 0
    if flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None:
        window = whole(config, "sliding_window", 4096)
    first = whole(config, "max_window_layers", 28, least=0)
    usual = [SLIDING if window and at >= first else FULL for at in range(depth)]
    return _mixed(config, about, parts, usual, {FULL: 0, SLIDING: window})


def _mixed(
    config: Config, about: str, parts: Decoder, usual: list[str], windows: dict[str, int], *, tied: bool = False,
    before: str = "", after: str = "", rotary: dict[str, Rope] | None = None,
) -> str:
    """Write a model with layers that see everything and layers that see a window."""
    found = usual if config.get("layer_types") is None else words(config, "layer_types", (FULL, SLIDING))
    if len(found) != len(usual):
        raise UsageError(f"config.json: layer_types has {len(found)} entries, but num_hidden_layers is {len(usual)}")
    angles = rotary or dict.fromkeys(KINDS, rope(config, parts.head))
    kinds = {KINDS[kind]: parts.layer(angles[kind], windows[kind]) for kind in dict.fromkeys(found)}
    layers = [KINDS[kind] for kind in found]
    return _written(config, about, layers, kinds, parts, tied=tied, before=before, after=after)


def mixtral(config: Config) -> str:
    """Write a Mixtral language model (arXiv:2401.04088): experts in each layer."""
    require(config, hidden_act="silu", router_jitter_noise=(0.0, 0, None))
    names = Names(experts="block_sparse_moe", gated=("w1", "w3", "w2"))
    parts = decoder(config, 8, eps=1e-5)._replace(official=names)
    count, top = whole(config, "num_local_experts", 8), whole(config, "num_experts_per_tok", 2)
    network = Experts(count, top, parts.hidden, True)
    rotary = rope(config, parts.head, 1000000.0)
    layer = parts.layer(rotary, window_of(config), network)
    model = language(config, "Mixtral language model", [], parts.eps)
    return model.text(["full"] * depth_of(config), {"full": layer}, parts.names(dense=False, experts=True))


def qwen3_moe(config: Config) -> str:
    """Write a Qwen3 language model with experts in some layers (arXiv:2505.09388)."""
    require(config, hidden_act="silu", use_sliding_window=(False, None))
    bias = flag(config, "attention_bias", False)
    parts = decoder(config, 4, 128)._replace(each_head=True, bias=bias, bias_out=bias)
    count, top = whole(config, "num_local_experts", 128, least=0), whole(config, "num_experts_per_tok", 8)
    hidden, normalize = whole(config, "moe_intermediate_size", 768), flag(config, "norm_topk_prob", False)
    every, listed = whole(config, "decoder_sparse_step", 1), numbers(config, "mlp_only_layers")
    layers = [
        "sparse" if at not in listed and count and (at + 1) % every == 0 else "dense" for at in range(depth_of(config))
    ]
    rotary = rope(config, parts.head)
    kinds = {"sparse": parts.layer(rotary, 0, Experts(count, top, hidden, normalize)), "dense": parts.layer(rotary)}
    model = language(config, "Qwen3 language model with experts", [], parts.eps)
    return model.text(layers, used(kinds, layers), parts.names("dense" in layers, "sparse" in layers))


def smollm3(config: Config) -> str:
    """Write a SmolLM3 language model: each fourth layer has no positions (arXiv:2501.18795)."""
    require(config, hidden_act="silu", use_sliding_window=(False, None))
    bias, network = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    parts = decoder(config, 4)._replace(bias=bias, bias_out=bias, bias_network=network)
    depth, every = depth_of(config), whole(config, "no_rope_layer_interval", 4)
    turned = numbers(config, "no_rope_layers") or [int((at + 1) % every != 0) for at in range(depth)]
    if len(turned) != depth:
        raise UsageError(f"config.json: no_rope_layers has {len(turned)} entries, but num_hidden_layers is {depth}")
    if config.get("layer_types") is not None:
        words(config, "layer_types", (FULL,))
    layers = ["turned" if each else "plain" for each in turned]
    kinds = {"turned": parts.layer(rope(config, parts.head, 2000000.0)), "plain": parts.layer(None)}
    return _written(config, "SmolLM3 language model", layers, kinds, parts, tied=True)


def olmo2(config: Config) -> str:
    """Write an OLMo 2 language model (arXiv:2501.00656): norms after each part, and of all queries and keys."""
    require(config, hidden_act="silu")
    bias = flag(config, "attention_bias", False)
    parts = decoder(config, eps=1e-5)._replace(
        bias=bias, bias_out=bias, all_heads=True, before=("", ""),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    )  # fmt: skip
    return _uniform(config, "OLMo 2 language model", parts)


def phi3(config: Config) -> str:
    """Write a Phi-3 language model (arXiv:2404.14219). longrope has the angles of short sequences."""
    require(config, hidden_act="silu", resid_pdrop=(0.0, 0, None), embd_pdrop=(0.0, 0, None))
    parts = decoder(config, eps=1e-5)._replace(joined=True)
    return _uniform(config, "Phi-3 language model", parts, window_of(config))


def gemma2(config: Config) -> str:
    """Write a Gemma 2 language model (arXiv:2408.00118)."""
    name = "attn_logit_softcapping"
    soft_cap = 0.0 if config.get(name, 50.0) is None else above_0(config, name, 50.0)
    usual = [(SLIDING, FULL)[at % 2] for at in range(depth_of(config))]
    return _gemma(config, "Gemma 2 language model", usual, soft_cap, 30.0)


def gemma3(config: Config) -> str:
    """Write a Gemma 3 language model (arXiv:2503.19786), without its image encoder."""
    require(config, attn_logit_softcapping=(None,))
    every = whole(config, "sliding_window_pattern", 6)
    usual = [SLIDING if (at + 1) % every else FULL for at in range(depth_of(config))]
    head = whole(config, "head_dim", 256)
    angles = {
        FULL: rope(config, head, 1000000.0, kind=FULL),
        SLIDING: rope(config, head, 10000.0, kind=SLIDING, base_name="rope_local_base_freq"),
    }
    return _gemma(config, "Gemma 3 language model", usual, 0.0, None, angles)


def _gemma(
    config: Config, about: str, usual: list[str], soft_cap: float, last_cap: float | None,
    rotary: dict[str, Rope] | None = None,
) -> str:  # fmt: skip
    require(config, hidden_activation=(GELU, None), use_bidirectional_attention=(False, None))
    bias, dim = flag(config, "attention_bias", False), whole(config, "hidden_size")
    parts = decoder(config, 4, 256)._replace(
        bias=bias, bias_out=bias, each_head=rotary is not None, gain="one_plus", activation="gelu_tanh",
        scale=above_0(config, "query_pre_attn_scalar", 256) ** -0.5, soft_cap=soft_cap,
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    )  # fmt: skip
    window = whole(config, "sliding_window", 4096)
    name = "final_logit_softcapping"
    capped = config.get(name, last_cap) is not None
    after = f"- soft_cap: {{cap: {scalar(above_0(config, name, last_cap or 0.0))}}}" if capped else ""
    before = f"- scale: {{by: {in_float32(math.sqrt(dim))}, name: embedded}}"
    windows = {FULL: 0, SLIDING: window}
    return _mixed(config, about, parts, usual, windows, tied=True, before=before, after=after, rotary=rotary)


def in_float32(value: float) -> float:
    """Return a number rounded to float32, in which transformers stores the embedding's scale."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
