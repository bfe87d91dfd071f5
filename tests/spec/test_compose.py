"""The composer of random specs (tests/compose.py) writes every verb of the language, and mostly what is accepted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from seqblocks.analysis import check
from seqblocks.combinators import COMBINATORS
from seqblocks.errors import SpecError
from seqblocks.op import builtin_verbs
from tests.compose import compose

SPECS = [compose(seed) for seed in range(400)]


def test_every_verb_and_key_is_written() -> None:
    written: Counter[str] = Counter()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            written.update(list(node))
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    for text in SPECS:
        visit(json.loads(text))
    wanted = {*builtin_verbs(), *COMBINATORS, "from", "as", "init", "tie", "own", "let", "args", "drop_path", "pattern"}
    assert {word for word in wanted if written[word] < 5} == set()


def test_most_are_accepted() -> None:
    """What the composer gets wrong is rejected: a few in a hundred."""
    accepted = 0
    for text in SPECS:
        try:
            check.load_text(text)
            accepted += 1
        except SpecError:
            continue
    assert accepted >= 0.95 * len(SPECS)


def test_the_same_seed_gives_the_same_spec() -> None:
    assert SPECS[:20] == [compose(seed) for seed in range(20)]
