"""The composer of random specs (tests/compose.py) covers the whole language, and most of its specs are accepted."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.combinators import COMBINATORS
from seqblocks.errors import SpecError
from seqblocks.op import builtin_verbs
from tests.compose import Composer, compose

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")  # some of these specs are invalid on purpose


@functools.cache
def specs() -> list[str]:
    return [compose(seed) for seed in range(600)]


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings of a spec."""
    if isinstance(node, dict):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from mappings(value)


def test_every_verb_and_key_is_written() -> None:
    written = Counter(key for text in specs() for node in mappings(json.loads(text)) for key in node)
    keys = {"from", "as", "init", "tie", "share", "when", "own", "let", "args", "drop_path", "pattern"}
    expected = {*builtin_verbs(), *COMBINATORS, *keys}
    missing = {word for word in expected if written[word] < 5}
    assert not missing, f"add {', '.join(sorted(missing))} to tests/compose.py"


def test_arguments_that_change_how_a_verb_runs_are_written() -> None:
    steps = [node.items() for text in specs() for node in mappings(json.loads(text))]
    written = Counter(f"{verb}.{key}" for pairs in steps for verb, x in pairs if isinstance(x, dict) for key in x)
    expected = {"attention.prefix", "attention.scores", "attention.keep_first", "attention.logsumexp",
                "merge_attention.logsumexp", "experts.capacity", "experts.shared"}
    assert all(written[word] >= 5 for word in expected), written


@pytest.mark.slow
def test_tokens_become_more_than_the_input_has() -> None:
    expected = {"upsample", "conv_transpose1d", "rearrange", "open", "fixed", "streams"}
    written: Counter[str] = Counter()
    for text in specs():
        if all(written[word] >= 5 for word in expected):
            return
        try:
            _, model = check.load_text(text)
        except SpecError:
            continue
        for node in graph.walk(model.graph):
            if node.type and node.wires and node.wires[0] and node.type.rate < min(1, node.wires[0].rate):
                streams = graph.stream_obstacle(model) is None
                written.update([node.verb, "open" if isinstance(node.type.length, str) else "fixed"])
                written["streams"] += streams
    pytest.fail(f"of the 600 specs, only {written}")


@pytest.mark.slow
def test_most_are_accepted() -> None:
    """A few specs in a hundred may be rejected."""
    accepted = 0
    for text in specs()[:300]:
        try:
            check.load_text(text)
            accepted += 1
        except SpecError:
            continue
    assert accepted >= 0.95 * 300


def test_the_same_seed_gives_the_same_spec() -> None:
    assert specs()[:20] == [compose(seed) for seed in range(20)]


MIXERS = {
    "attention", "causal_conv", "centaurus", "conv1d", "linear_attention", "mlstm", "mlstm_memoroid", "slstm", "ssm",
    "token_shift",
}  # fmt: skip


@pytest.mark.slow
def test_streaming_specs_cover_every_mixer_in_every_combinator() -> None:
    """The state law is therefore checked for each mixer inside each combinator."""
    met: set[tuple[str, str]] = set()

    def visit(node: Any, around: frozenset[str]) -> None:
        if isinstance(node, list):
            for part in node:
                visit(part, around)
        elif isinstance(node, dict):
            for verb, value in node.items():
                within = around | ({"when"} if isinstance(value, dict) and "when" in value else set())
                met.update((outer, verb) for outer in within)
                visit(value, within | ({verb} & {*COMBINATORS, "blocks"}))

    for seed in range(2800):
        visit(json.loads(Composer(random.Random(seed), streams=True).compose()), frozenset())
    expected = {(outer, inner) for outer in {*COMBINATORS, "blocks"} for inner in MIXERS | set(COMBINATORS)}
    expected |= {("when", verb) for verb in COMBINATORS}
    expected -= {(outer, inner) for outer in ("experts", "cell") for inner in {*MIXERS, "cell"}}  # single tokens (E417)
    expected -= {("experts", "choose"), ("cell", "choose"), ("each", "cell")}  # E417, E420
    assert expected - met == set()
