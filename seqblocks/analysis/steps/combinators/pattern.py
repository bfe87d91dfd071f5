"""Read the pattern of a `repeat`: words with counts, groups in parentheses, and words of single letters."""

from __future__ import annotations

import re
from collections.abc import Container

from seqblocks.combinators import MAX_REPEATS
from seqblocks.errors import Fault, quote

# An opening parenthesis; or a closing one or a word, with a count, before a space or a closing parenthesis.
_ITEM = r"\(|(?P<item>\)|[A-Za-z_][A-Za-z0-9_]*)(?:\*(?P<count>[0-9]{1,4}))?(?![^\s)])"  # compiled on first use


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
    found, at = list[tuple[str, str | None, int]](), 0
    while rest := pattern[at:].lstrip():
        at = len(pattern) - len(rest)
        match = re.match(_ITEM, rest)
        if not match or match["count"] == "0":
            raise _invalid(f"{quote(rest.split()[0])} is not a word of a pattern")
        found.append((match[0], match["item"], int(match["count"] or 1)))
        at += match.end()
    return found


def _letters(word: str, known: Container[str]) -> list[str]:
    return [*word] if word not in known and all(letter in known for letter in word) else [word]


def _invalid(message: str) -> Fault:
    return Fault("E601", message, at="pattern", expected="m, m*7, (m s)*7, or a word of letters: mms*7")
