"""Find the word that the author probably meant: by spelling, or by the name that other libraries use.

Names used by other libraries are in `vocabulary.yaml`, which is read only when a hint needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from seqblocks.errors import Suggestion, listing
from seqblocks.record import Record

MAX_KNOWN = 2000  # limit on the number of words compared for a hint
CLOSE = 0.65  # least similarity of a misspelt word
CLOSE_WITHOUT_INITIAL = 0.72  # the same if the first letters differ, as they rarely do by mistake


class Vocabulary(Record):
    """Names used by other libraries."""

    elsewhere: dict[str, list[str]]
    """Name in another library -> possible names in seqblocks."""
    instead: dict[str, str]
    """Name without a counterpart in seqblocks -> what to use instead."""
    needless: dict[str, str]
    """Argument that other libraries need -> why a step does not."""


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Read `vocabulary.yaml`."""
    import yaml

    text = Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C loader is ten times faster
    elsewhere: dict[str, list[str]] = {}
    for ours, theirs in data["called"].items():
        for name in theirs.split():
            elsewhere.setdefault(name, []).extend(ours.split())
    instead, needless = (
        {name: entry["instead"] for entry in data[key] for name in entry["words"].split()}
        for key in ("absent", "needless")
    )
    return Vocabulary(elsewhere, instead, needless)


def called_elsewhere(word: str) -> list[str]:
    """Return the possible seqblocks names for a name used by another library."""
    return vocabulary().elsewhere.get(word.lower(), [])


def instead_of(word: str) -> str | None:
    """Return what to use instead of a feature that seqblocks does not have, as a hint."""
    return vocabulary().instead.get(word.lower())


def why_needless(key: str) -> str | None:
    """Return why a step does not need an argument of another library, as a hint."""
    return vocabulary().needless.get(key.lower())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, by spelling or by its name in another library."""
    import difflib  # slow to import, and only needed after an error

    lowered = {w.lower(): w for w in reversed(list(islice(known, MAX_KNOWN)))}
    word = word[:80].lower()
    close = difflib.get_close_matches(word, [w for w in lowered if w[:1] == word[:1]], n=1, cutoff=CLOSE)
    close = difflib.get_close_matches(word, lowered, n=1, cutoff=CLOSE_WITHOUT_INITIAL) or close
    alias = next((ours for ours in called_elsewhere(word) if ours in lowered), None)
    if alias and not difflib.get_close_matches(word, lowered, n=1, cutoff=0.9):
        return lowered[alias]
    return lowered[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a "did you mean" hint, or None if no known word is close."""
    suggestion = nearest(word, known)
    only = " It is exact; gelu_tanh is the approximation" if "gelu" in called_elsewhere(word) else ""
    if suggestion is None:
        return None
    text = f"did you mean '{suggestion}'?{only if suggestion == 'gelu' else ''}"
    return Suggestion.of(text, word, suggestion)


def is_renamed(verb: str, names: Sequence[str]) -> str:
    """Return the hint for a verb in the place of the name of a step. names: those of the steps with this verb."""
    return f"the {verb} step{' is' if len(names) == 1 else 's are'} now named {listing(names)}, by `as:` or `name:`"


def missing_colon(text: str, known: Iterable[str] | None = None) -> str | None:
    """Return a hint if `text` looks like a key and its value without the colon (or the space) between them.

    Only the keys in `known` are considered, or any word if `known` is not given.
    """
    match = re.match(r"([A-Za-z_]\w*)(\s*=\s*|:|\s+)\S", text)
    if not match or (known is not None and match[1] not in known):
        return None
    if match[2] == ":":
        return f"a space is missing after the colon of `{match[1]}:`"
    if "=" in match[2]:
        return f"write a colon between the key and its value: `{match[1]}: …`"
    return f"a colon is missing after `{match[1]}`"


def key_hint(key: str, known: Iterable[str]) -> str | None:
    """Return a hint for an unknown key: it contains its value too (a missing colon), or is misspelt."""
    words = list(known)
    return missing_colon(key, words) or did_you_mean(key, words)
