"""Arguments of `repeat`: consecutive layers, and the pattern of their words."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

import re
from collections.abc import Container
from typing import Any, Literal

from seqblocks.combinators import MAX_REPEATS, Combinator, combinator
from seqblocks.errors import Fault, quote
from seqblocks.op import argument

# An opening parenthesis; or a closing one or a word, with a count, before a space or a closing parenthesis.
_ITEM = r"\(|(?P<item>\)|[A-Za-z_][A-Za-z0-9_]*)(?:\*(?P<count>[0-9]{1,4}))?(?![^\s)])"  # compiled on first use


@combinator("repeat")
class Repeat(Combinator):
    """Repeat steps several times in sequence, with separate parameters for each layer unless they are shared.

    Write `times: 12` with `steps`, or `pattern: m*3 s m*16 s` with the steps of each word under that word; `times` then
    repeats the pattern. `(m m s)*4` repeats a group, and `mms*4` is the same if there are steps for `m` and `s` and
    none for `mms`. Inside, `layer` is the layer index (from 0) and `layers` the number of layers. With `share`,
    layers use the parameters of the first layer (in a pattern, of the first layer with the same word).

    A layer can read wires of the layers above it: `layers.0.v`, or `layers[-1].v or input`, which says what to read
    where there is none. After the repeat, its name takes the place of `layers`.
    """

    times: int = argument(1, "number of repetitions of the steps or the pattern (may be 0)", ge=0, le=MAX_REPEATS)
    pattern: str | None = argument(
        None, "words with counts, for instance `m*7 s` or `(m*7 s)*6`; each word is a key with its steps"
    )
    index: str = argument(
        "layer", "name of the layer index inside the steps; the number of layers has the plural of this name"
    )
    share: Literal["all", "none"] | list[str] | str = argument(
        "none",
        "what layers share: all, none, or a list of steps and parameters; or a step to share with",
    )
    steps: Any = argument(None, "the steps to repeat, if there is no pattern")
    open_keys = True


def read_pattern(pattern: str, known: Container[str]) -> list[str]:
    """Return the word of each layer. known: the words that have steps. Raises Fault (E601, E604).

    An unknown word whose letters are all known stands for these: `mma*2` is `(m m a)*2`.
    """
    groups: list[list[str]] = [[]]
    for text, item, count in _items(pattern):
        if item is None:
            groups.append([])
            continue
        if item == ")" and (len(groups) == 1 or not groups[-1]):
            what = "closes no group" if len(groups) == 1 else "closes a group without words"
            raise _invalid(f"the {quote(text)} {what}")
        words = groups.pop() if item == ")" else _letters(item, known)
        if (len(groups[-1]) + len(words) * count) > MAX_REPEATS:
            raise Fault("E604", "too many layers", at="pattern", expected=f"at most {MAX_REPEATS}")
        groups[-1] += words * count
    if len(groups) > 1:
        raise _invalid("a parenthesis of the pattern is not closed")
    if not groups[0]:
        raise Fault("E601", "the pattern is empty", at="pattern", expected="words such as m*7 s")
    return groups[0]


def _items(pattern: str) -> list[tuple[str, str | None, int]]:
    """Return the items of a pattern: the text, the word or `)`, or None for `(`, and the count. Raises Fault (E601)."""
    found, at, item = list[tuple[str, str | None, int]](), 0, re.compile(rf"\s*(?:{_ITEM})")
    pattern = pattern.rstrip()
    while at < len(pattern):
        match = item.match(pattern, at)
        if not match or match["count"] == "0":
            raise _invalid(f"{quote(pattern[at:].split()[0])} is not a word of a pattern")
        found.append((match[0].lstrip(), match["item"], int(match["count"] or 1)))
        at = match.end()
    return found


def _letters(word: str, known: Container[str]) -> list[str]:
    return [*word] if word not in known and all(letter in known for letter in word) else [word]


def _invalid(message: str) -> Fault:
    return Fault("E601", message, at="pattern", expected="m, m*7, (m s)*7, or a word of letters: mms*7")
