"""Near words: what a misspelt word may mean, and what other libraries call the same thing.

The words of other libraries are in `vocabulary.yaml`, which is read when a fault needs a hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

MAX_KNOWN = 2000  # words that a hint looks through


class Vocabulary(NamedTuple):
    """Words of other libraries."""

    elsewhere: dict[str, list[str]]
    """By a word of another library: what it may be called in seqblocks."""
    instead: dict[str, str]
    """By a word that has no counterpart: what there is."""


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Read `vocabulary.yaml`."""
    import yaml

    text = Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C a tenth of the time
    elsewhere: dict[str, list[str]] = {}
    for ours, theirs in data["called"].items():
        for name in theirs.split():
            elsewhere.setdefault(name, []).extend(ours.split())
    instead = {name: entry["instead"] for entry in data["absent"] for name in entry["words"].split()}
    return Vocabulary(elsewhere, instead)


def called_elsewhere(word: str) -> list[str]:
    """Return what a word of another library may be called in seqblocks."""
    return vocabulary().elsewhere.get(word.lower(), [])


def instead_of(word: str) -> str | None:
    """Return what there is in place of something that other libraries have."""
    return vocabulary().instead.get(word)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is meant: one close in letters, or what another library's word is called here."""
    import difflib  # only a spec with a fault pays for it

    lowered = {w.lower(): w for w in reversed(list(islice(known, MAX_KNOWN)))}
    word = word[:80].lower()
    close = difflib.get_close_matches(word, lowered, n=1, cutoff=0.65)
    alias = next((ours for ours in called_elsewhere(word) if ours in lowered), None)
    if alias and not difflib.get_close_matches(word, lowered, n=1, cutoff=0.9):
        return lowered[alias]
    return lowered[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a hint that names the known word that is meant, if there is one."""
    meant = nearest(word, known)
    only = " It is the exact one; gelu_tanh approximates it" if "gelu" in called_elsewhere(word) else ""
    return meant and f"did you mean '{meant}'?{only if meant == 'gelu' else ''}"


def missing_colon(text: str, known: Iterable[str] | None = None) -> str | None:
    """Return a hint where `text` is a key and its value without the colon (or the space) between them.

    `known` are the keys that there may be; without them any word will do.
    """
    match = re.match(r"([A-Za-z_]\w*)(\s*=\s*|:|\s+)\S", text)
    if not match or (known is not None and match[1] not in known):
        return None
    if match[2] == ":":
        return f"a space is missing after the colon of `{match[1]}:`"
    if "=" in match[2]:
        return f"a key and its value are separated by a colon: `{match[1]}: …`"
    return f"a colon is missing after `{match[1]}`"


def key_hint(key: str, known: Iterable[str]) -> str | None:
    """Return a hint for a key that is not known: it holds its value too, or is misspelt."""
    words = list(known)
    return missing_colon(key, words) or did_you_mean(key, words)
