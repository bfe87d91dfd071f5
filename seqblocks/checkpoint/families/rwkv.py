"""RWKV-4 from the config.json of transformers: averages of values with exponential weights, one per feature."""

from __future__ import annotations

import math

from seqblocks.checkpoint.families.dense import residual
from seqblocks.checkpoint.families.text import Language
from seqblocks.checkpoint.families.values import Config, above_0, depth_of, flag, scalar, whole, whole_or

OURS, OFFICIAL = "layers.{layer}", "rwkv.blocks.{layer}"
LATE = "layer / max(layers - 1, 1)"  # from 0 to 1
EARLY = "(1 - layer / layers)"  # from 1 to nearly 0
DECAY = f"waves(-5, 3, 0.7 + 1.3 * {LATE})"
# A mean of all values so far, with weights exp(key) that decay, and one that `first` increases for the current token.
# Sums are relative to the largest exponent, `peak`. The state begins without a token.
MEAN = """- cell:
    from: k
    state: {{top: {width}, bottom: {width}, peak: {{features: {width}, start: -1e9}}}}
    steps:
      - calc:
          here: k + first
          most: max(peak, here)
          old: exp(peak - most)
          new: exp(here - most)
          mean: (old * top + new * v) / (old * bottom + new)
          next: max(peak + w, k)
          kept: exp(peak + w - next)
          added: exp(k - next)
          top: kept * top + added * v
          bottom: kept * bottom + added
          peak: next
      - identity: {{from: mean}}"""


def rwkv(config: Config) -> str:
    """Write an RWKV-4 language model (arXiv:2305.13048).

    Like transformers, it halves the features after every few layers, and the results of the layers after these.
    """
    dim, depth = whole(config, "hidden_size"), depth_of(config)
    eps, every = above_0(config, "layer_norm_epsilon", 1e-5), whole(config, "rescale_every", 6, least=-(10**9))
    halved = 0 < every <= depth
    steps = [
        residual("attention", _attention(config, dim, eps, every if halved else 0)),
        residual("network", _network(config, dim, eps, every if halved else 0)),
    ]
    if halved:
        steps.append(f'- scale: {{by: 0.5, when: "(layer + 1) % {every} == 0"}}')
    vocabulary = whole(config, "vocab_size", 50277)
    return Language(
        "RWKV-4 language model", [], dim, vocabulary, "layer_norm: {name: norm}",
        flag(config, "tie_word_embeddings", False), ("rwkv.embeddings", "rwkv.ln_out"), "head",
        before=f"- layer_norm: {{eps: {scalar(eps)}, name: first_norm}}",
        embedding=f"orthogonal({1e-4 * math.sqrt(max(vocabulary, dim))!r})",
        unembedding=f"orthogonal({0.5 * math.sqrt(max(vocabulary / dim, 1))!r})",
    ).text(["rwkv"] * depth, {"rwkv": "\n".join(steps)}, "\n".join(_names(dim)) + "\n")  # fmt: skip


def _linear(features: int, inputs: int, name: str) -> str:
    drawn = f"orthogonal({math.sqrt(max(features / inputs, 1))!r})"
    return f'- linear: {{features: {features}, bias: false, init: {{weight: "{drawn}"}}, {name}}}'


def _mixed(dim: int, name: str, power: str, more: str = "0") -> str:
    """Return the step that mixes each token `h` with the previous one, with a learned share per feature.

    power: of the initial shares, which increase with the feature. more: added to them.
    """
    drawn = f"waves({more}, {more} + {(dim - 1) / dim!r} ** {power}, {power})"
    return f'- lerp: {{from: before, to: h, init: {{weight: "{drawn}"}}, name: {name}}}'


def _halvings(every: int) -> list[str]:
    return [f'- scale: {{by: "0.5 ** (layer // {every})"}}'] * bool(every)


def _attention(config: Config, dim: int, eps: float, every: int) -> list[str]:
    width = whole_or(config, "attention_hidden_size", dim)
    return [
        f"- layer_norm: {{eps: {scalar(eps)}, name: norm, as: h}}",
        "- shift: {by: 1, as: before}",
        _mixed(dim, "mix_k", EARLY),
        _linear(width, dim, "name: key, as: k"),
        _mixed(dim, "mix_v", EARLY, f"0.3 * {LATE}"),
        _linear(width, dim, "name: value, as: v"),
        _mixed(dim, "mix_r", f"(0.5 * {EARLY})"),
        _linear(width, dim, "name: receptance, as: r"),
        f'- constant: {{from: h, features: {width}, init: {{weight: "{DECAY}"}}, name: decay}}',
        "- log_decay: {kind: exp, as: w}",
        f"- constant: {{from: h, features: {width}, value: 1, name: first, as: first}}",
        *MEAN.format(width=width).splitlines(),
        "- gate: {by: r, activation: sigmoid}",
        _linear(dim, width, "name: output"),
        *_halvings(every),
    ]


def _network(config: Config, dim: int, eps: float, every: int) -> list[str]:
    hidden = whole_or(config, "intermediate_size", 4 * dim)
    return [
        f"- layer_norm: {{eps: {scalar(eps)}, name: norm, as: h}}",
        "- shift: {by: 1, as: before}",
        _mixed(dim, "mix_r", EARLY),
        _linear(dim, dim, "name: receptance, as: r"),
        _mixed(dim, "mix_k", EARLY),
        _linear(hidden, dim, "name: key"),
        "- squared_relu",
        _linear(dim, hidden, "name: value"),
        "- gate: {by: r, activation: sigmoid}",
        *_halvings(every),
    ]


def _names(dim: int) -> list[str]:
    """Return the lines of the map."""
    lines = ["first_norm: rwkv.blocks.0.pre_ln"]
    mixes = {"mix_k": "time_mix_key", "mix_v": "time_mix_value", "mix_r": "time_mix_receptance"}
    for at, (part, official) in enumerate((("attention", "attention"), ("network", "feed_forward"))):
        own, theirs = f"{OURS}.{part}", f"{OFFICIAL}.{official}"
        lines.append(f"{own}.norm: {OFFICIAL}.ln{at + 1}")
        lines += [f"{own}.{name}: {theirs}.{name}" for name in ("key", "value", "receptance")]
        lines += [
            f'{own}.{name}.weight: {{reshape: "{theirs}.{found}", shape: [1, 1, {dim}]}}'
            for name, found in mixes.items() if part == "attention" or name != "mix_v"
        ]  # fmt: skip
    own, theirs = f"{OURS}.attention", f"{OFFICIAL}.attention"
    return [
        *lines, f"{own}.output: {theirs}.output", f"{own}.decay.weight: {theirs}.time_decay",
        f"{own}.first.weight: {theirs}.time_first",
    ]  # fmt: skip
