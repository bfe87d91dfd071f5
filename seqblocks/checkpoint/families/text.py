"""The text of a language model's spec: an embedding, layers of several kinds in some order, a norm, a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from seqblocks.checkpoint.families.values import Config, flag, scalar, std_of, whole

CACHE = 2048  # tokens cached by attention without a window; change it with `set={"cache": …}`


class Language(NamedTuple):
    """The common parts of language models.

    norm: the step of the last norm. names, head: the official names of the embedding and of that norm, and of the head.
    before, after: steps after the embedding and after the head. share: the parameters that layers of one kind share.
    std: standard deviation of the initial values of the embedding, and of the head unless it is tied. embedding,
    unembedding: other initial values of these.
    """

    about: str
    use: Sequence[str]
    dim: int
    vocabulary: int
    norm: str
    tied: bool
    names: tuple[str, str] = ("model.embed_tokens", "model.norm")
    head: str = "lm_head"
    before: str = ""
    after: str = ""
    share: str = ""
    std: float = 0.02
    embedding: str = ""
    unembedding: str = ""

    def text(self, layers: Sequence[str], kinds: Mapping[str, str], checkpoint: str) -> str:
        """Return the spec. layers: the kind of each; kinds: their steps, line by line; checkpoint: lines of the map."""
        embed, norm_name = self.names
        embedding, unembedding = (each or normal(self.std) for each in (self.embedding, self.unembedding))
        head = "tie: embed" if self.tied else f'init: {{weight: "{unembedding}"}}'
        return f"""seqblocks: 1
about: {self.about}, as its config.json says
use: [{", ".join(self.use)}]

let: {{dim: {self.dim}, vocabulary: {self.vocabulary}, cache: {CACHE}}}

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim, init: {{weight: "{embedding}"}}, name: embed}}
{_lines(self.before, 4)}    - repeat:
        name: layers
        pattern: {pattern(layers)}
{_lines(self.share, 8)}{_kinds(kinds)}    - {self.norm}
    - unembed: {{bias: false, {head}}}
{_lines(self.after, 4)}
checkpoint:
  embed: {embed}
{_lines(checkpoint, 2)}  norm: {norm_name}
  unembed: {self.head}
"""


def language(
    config: Config, about: str, use: Sequence[str], eps: float, *, gain: str = "plain", tied: bool = False
) -> Language:
    """Return the parts that most configs store under the same names.

    eps, gain: of the last norm. tied: the default if the config does not say whether embeddings are tied.
    """
    return Language(
        about,
        use,
        dim=whole(config, "hidden_size"),
        vocabulary=whole(config, "vocab_size"),
        norm=f"rms_norm: {{name: norm, gain: {gain}, eps: {scalar(eps)}}}",
        tied=flag(config, "tie_word_embeddings", tied),
        std=std_of(config),
    )


def normal(std: float) -> str:
    """Return the initialiser of a normal distribution."""
    return f"normal(0, {scalar(std)})"


def scaled(factor: float, name: str) -> str:
    """Return the step that multiplies by a factor, empty if it is 1."""
    return "" if factor == 1.0 else f"- scale: {{by: {scalar(factor)}, name: {name}}}"


def network_init(std: float) -> str:
    """Return the initial values of a gated network as YAML."""
    parts = ", ".join(f'{part}_weight: "{normal(std)}"' for part in ("gate", "up", "down"))
    return f"{{{parts}}}"


def pattern(layers: Sequence[str]) -> str:
    """Return a pattern with repeated kinds counted: a a b becomes a*2 b."""
    runs = [(word, len(list(some))) for word, some in groupby(layers)]
    return " ".join(word if count == 1 else f"{word}*{count}" for word, count in runs)


def swiglu(ours: str, theirs: str, bias: bool = False) -> str:
    """Return the lines of a map for a gated network."""
    whole = [(name, kind) for kind in ("weight", "bias")[: 1 + bias] for name in ("gate", "up", "down")]
    return "\n".join(f"{ours}.{name}_{kind}: {theirs}.{name}_proj.{kind}" for name, kind in whole)


def _kinds(kinds: Mapping[str, str]) -> str:
    return "".join(f"{' ' * 8}{word}:\n{_lines(steps, 10)}" for word, steps in kinds.items())


def _lines(text: str, indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in text.splitlines() if line.strip())
