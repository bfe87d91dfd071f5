"""Texts that an editor has open, for tests."""

from __future__ import annotations

from pathlib import Path

from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.errors import Span

SOME = ("jamba_small", "captioner", "vil", "transformer")
HEAD = """\
seqblocks: 1
use: [prenorm]
let: {dim: 64, act: silu, wide: 2 * dim}
blocks:
  mine:
    args: {width: int, other: wire, inner: steps}
    let: {half: width / 2}
    steps:
      - linear: {features: width, as: m}
      - inner
model:
  input: {features: dim}
  steps:
    - linear: {features: wide, as: x, name: first}
"""


TWO = """\
seqblocks: 1
let: {dim: 8}
blocks:
  mine:
    args: {width: int, body: steps}
    steps:
      - linear: {features: width, as: h}
      - body
      - linear: {from: h, features: width, name: out}
model:
  input: {features: dim}
  steps:
    - linear: {features: dim, as: q}   # kept
    - silu: {as: r}
    - mine: {width: dim, body: [{linear: {features: "2 * dim"}}]}
    - gate: {from: q, by: r}
    - repeat:
        times: 2
        steps: [{mine: {width: dim, body: [layer_norm]}}]
expect: {output: [batch, seq, dim]}
"""


def opened(text: str, path: Path | None = None, before: Opened | None = None) -> Opened:
    return Opened(text, path, before=before)


def spot_of(text: str, word: str) -> Spot:
    before = text[: text.index(word)].split("\n")
    return Spot(len(before), len(before[-1]) + 1)


def starts(span: Span) -> tuple[int, int]:
    return span.line, span.column


def ends(span: Span) -> tuple[int, int]:
    return span.end_line, span.end_column
