"""What an editor and a picture promise for all bundled specs and many edits. benchmarks/results lists each promise."""

from __future__ import annotations

import gc
import random
import re
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import seqblocks
from seqblocks import graph
from seqblocks.descriptions import reference
from seqblocks.descriptions.summary import Row, summarise
from seqblocks.editor import rename
from seqblocks.editor.completion import Item, bundled_blocks, complete
from seqblocks.editor.cursor import HOLE, at_cursor
from seqblocks.editor.edits import Edit, applied
from seqblocks.editor.hints import facts, hints
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.errors import Span
from seqblocks.language.spec_files import bundled
from tests.spec.test_analyse import inside

FILES = bundled()


def opened(path: Path) -> Opened:
    return Opened(path.read_text("utf-8"), path)


def start(span: Span) -> Spot:
    return Spot(span.line, span.column)


# --- the analysis -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_damaged_specs_are_analysed_as_fast_as_good_ones() -> None:
    """A text without one character, or cut at one: ranges lie in it; it takes at most 10 times the good one's time."""
    chance = random.Random(5)
    for name, path in FILES.items():
        text = path.read_text("utf-8")
        good = min(_time(text, path) for _ in range(3))
        for _ in range(8):
            at = chance.randrange(1, len(text))
            bad = text[:at] + ("" if chance.random() < 0.4 else text[at + 1 :])
            found = seqblocks.analyse(bad, name, path.parent)
            spans = [each.span for each in (*found.diagnostics, *found.steps, *found.references) if each.span]
            spans += [each.definition for each in found.references if each.definition]
            spans += [note.span for each in found.diagnostics for note in each.notes if note.span]
            spans += [each.fix.span for each in found.diagnostics if each.fix and each.fix.span]
            assert [span for span in spans if not inside(span)] == [], (name, at)
            taken = min(_time(bad, path) for _ in range(2))
            assert taken < 10 * good or taken < 0.05, (name, at, taken, good)


def _time(text: str, path: Path) -> float:
    before = time.process_time()
    seqblocks.analyse(text, path.stem, path.parent)
    return time.process_time() - before


# --- hints ------------------------------------------------------------------------------------------------------------


def _rows(found: list[Row]) -> Iterator[Row]:
    for row in found:
        yield row
        yield from _rows(row.rows)


@pytest.mark.slow
def test_hints_are_the_summary() -> None:
    """Shape and count of each step in every second model; the hint of a line is that of its first step."""
    compared = 0
    for path in [*FILES.values()][::2]:
        found = opened(path)
        if found.analysis.model is None:
            continue
        rows: dict[Span, list[Row]] = defaultdict(list)
        for row in _rows(summarise(found.analysis.model).rows):
            if row.node:
                rows[row.node.span].append(row)
        shown = {hint.spot.line: hint.text for hint in hints(found)}
        for step in found.steps:
            row = rows[step.span][0]
            assert (step.type, step.params) == (row.output, row.params), (path.stem, step.span)
            if found.is_own(step.span):
                others = [each for each in found.steps if each.span[:2] == step.span[:2]]
                assert shown[step.span.line] == facts(min(others, key=lambda each: each.span.column))
            compared += 1
    assert compared > 1000


# --- completion -------------------------------------------------------------------------------------------------------

INSIDE = "seqblocks: 1\nuse: [prenorm, attention]\nlet: {dim: 64, act: silu, wide: 2 * dim}\nmodel:\n"
STEPS = "  input: {features: dim}\n  steps:\n    - linear: {features: wide, as: x, name: first}\n"
TAILS = (
    "- |", "- lin|", "- residual: [|", "- residual:\n        steps:\n          - |", "- linear: {|",
    "- linear: {features: 3, |}", "- linear:\n        features: 3\n        |", "- linear:\n        |",
    "- linear: {features: |", "- linear: {features: 2 * |}", '- linear: {features: "round_up(|', "- linear: |",
    "- linear: {features: 8, from: |", "- concat: {from: [x, |]}", "- gate: {by: x, activation: |", "- gate: {by: |",
    "- linear: {features: 3, bias: |", "- linear: {features: 3, bias: |}", "- linear: {features: 3, share: |",
    "- linear: {features: 3, init: {|", "- linear: {features: 3, init: {weight: |", "- silu: {from: |}",
    "- linear: {features: 3, init: {weight: |}}", "- repeat: {times: 2, steps: [{linear: {features: |",
    "- repeat: {times: |", "- repeat: {times: 2, steps: [|", "- residual: [{linear: {|", "- rms_norm: {|",
    "- calc: {y: |}", "- calc: {y: x, z: |", "- parallel: {branches: [{a: [|", "- scan: {order: |",
    "- each: {axis: |", "- attention_layer: {|", "- attention_layer: {dim: |", "- attention_layer: {dim: dim, |}",
    "- cell: {state: {s: 8}, steps: [{calc: {s: |", "- pool: {mode: |", "- causal_conv: {kernel: |",
    "- causal_conv: {|}", "- mlstm: {q: |", "- mlstm: {q: x, k: |", "- add: {with: |", "- gate: {by: x, |",
    "- experts: {count: |", "- linear: {features: 3, when: |", "- dropout: |", "- dropout: {|", "- prenorm: {mixer: [|",
    "- prenorm:\n        mixer:\n          - |", "- linear: {features: wide, as: |",
    "- gelu: {as: b, |}", "- linear: {features: 3, bias: true, |", "- slice: {|", "- residual: {|",
    "- silu\nexpect: {|", "- silu\nexpect:\n  |", "- silu\n|", "- silu\n  outputs: [|",
    "- silu\nexpect: {params: |}", "- linear: 8\n    - |", "- linear: 8\n    - lin|",
    "- residual: [mlp]\n    - res|", "- choose: {by: |", "- unemb|", "- linear: {features: 8, tie: |",
    "- linear: {from: input, features: wide, share: |",
)  # fmt: skip
FILLS = (
    "8", "x", "identity", "0.5", "{a: 8}", "true", "m", "zeros", "first", "{a: [identity]}", "[mlstm]",
    "[batch, seq, 8]", "{params: 8}", "{b: {steps: [silu]}}", "8 > 0", "{}",
)  # fmt: skip


@pytest.mark.long
def test_what_is_offered_may_be_written() -> None:
    """At 60 positions, most in unfinished lines: an item adds no fault (E2, E3) to its line, with some value for its
    blanks. Faults that are there before, such as another argument that is missing, stay.
    """
    assert len(TAILS) >= 60
    assert sum(not tail.endswith(("}", "]", "\n")) for tail in TAILS) >= 20
    choices = {word for verb in reference.verbs().values() for each in reference.arguments(verb)
               for word in each.kind.choices or ()}  # fmt: skip
    fills = [*FILLS, *sorted(map(str, choices))]
    tried, wrong = 0, []
    for tail in TAILS:
        text = f"{INSIDE}{STEPS}    {tail}\n"
        at = text.index("|")
        text = text[:at] + text[at + 1 :]
        now = Opened(text, None, before=Opened(f"{INSIDE}{STEPS}", None))
        found = complete(now, now.lines.spot_at(at))
        items = found.items if found else []
        for item in random.Random(tail).sample(items, min(8, len(items))):
            if all(_faults(text, at, item, fill) for fill in fills):
                wrong.append((tail, item.text, _faults(text, at, item, "8")))
            tried += 1
    assert not wrong, "\n".join(map(str, wrong))
    assert tried > 300


def _faults(text: str, at: int, item: Item, fill: str) -> list[str]:
    """Return the faults that an item adds to the line at an offset, after the line is repaired."""
    word = re.sub(r"\[\$\d\]", "[]" if fill == "{}" else "[identity]", item.text)
    block, verb = bundled_blocks().get(item.label), reference.verbs().get(item.label)
    wires = {name for name, each in block[1].args.items() if each.type == "wire"} if block else set()
    wires |= {port.name for port in reference.ports(verb)} if verb else set()
    fills = dict.fromkeys(wires, "input")
    for each in reference.arguments(verb) if verb else ():
        choices = each.kind.choices
        fills |= {each.name: fill if fill in choices else choices[0]} if choices else {}
    word = re.sub(r"(\w+): \$\d", lambda blank: f"{blank[1]}: {fills.get(blank[1], fill)}", word)
    word = re.sub(r"\$\d", lambda _: fill, word)
    cursor = at_cursor(text, at)
    assert cursor
    done = cursor.text.replace(f"{HOLE}: ", HOLE) if ":" in word else cursor.text
    done = done.replace(HOLE, f"{word} > 0" if item.kind == "name" and fill == "8 > 0" else word)
    if item.more:
        done = applied(done, [Edit(*item.more)])
    line = text[:at].count("\n") + 1
    before = {*_in_line(cursor.text, line), *_in_line(cursor.text.replace(HOLE, ""), line)}
    if item.kind in ("name", "word", "wire"):  # with any value, another argument is missing
        before |= {each for each in _in_line(cursor.text.replace(HOLE, "8"), line) if each.startswith("E202")}
    found = _in_line(done, line + (item.more[1].count("\n") if item.more else 0))
    return [each for each in found if each not in before]


@lru_cache(maxsize=4096)
def _in_line(text: str, line: int) -> list[str]:
    """Return the faults of keys, values and names in a line."""
    found = (each for each in seqblocks.analyse(text).diagnostics if each.span and each.span.line == line)
    return [f"{each.code} {each.message}" for each in found if each.code[:2] in ("E2", "E3")]


# --- rename -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_wire_of_every_bundled_file_is_renamed() -> None:
    """The model and the names in its state_dict are equal, and lines without the name are as they were."""
    done, refused = 0, []
    for name, path in FILES.items():
        found = opened(path)
        defined = {each.definition for each in found.own_references.values() if each.kind == "wire" and each.definition}
        for span in sorted(span for span in defined if found.is_own(span)):
            try:
                edits = rename.rename(found, start(span), "w17")
            except rename.Refused as error:
                refused.append((name, span.text, str(error)))
                continue
            changed = Opened(applied(found.text, edits), path)
            assert changed.analysis.ok
            assert described(changed) == described(found)
            edited = {edit.span.line for edit in edits}
            kept = [line for at, line in enumerate(found.text.split("\n"), 1) if at not in edited]
            lines = iter(changed.text.split("\n"))
            assert all(line in lines for line in kept)  # in this order
            done += 1
    assert done > 380
    reasons = "calls of the built model", "output of the model", "change names in the state_dict"  # learned states
    assert [each for each in refused if not any(reason in each[2] for reason in reasons)] == []


def described(found: Opened) -> list[object]:
    body = found.analysis.lowered.body
    if body is None:
        return []
    parameters = [(each.name, each.parameter.shape) for each in graph.parameters(body)]
    return [parameters, [(str(node.type), node.kind) for node in graph.walk(body)]]


# --- many edits -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_thousand_edits() -> None:
    """Of a file with 300 lines and more: no exception, the state of a new analysis, and no growing memory."""
    path = FILES["xlstm"]
    good = path.read_text("utf-8") + "# more\n" * 40
    assert good.count("\n") > 300
    chance, text, now = random.Random(7), good, Opened(good, path)
    sizes = []
    for number in range(2001):
        at = chance.randrange(len(text))
        word, removed = chance.choice(["", "a", "{", " ", "\n", "- ", ": ", "🙂"]), chance.choice([0, 0, 1, 9])
        text = good if number % 20 == 0 else text[:at] + word + text[at + removed :]
        now = Opened(text, path, before=now)
        hints(now)
        if number % 4 == 0:
            complete(now, now.lines.spot_at(min(at, len(text))))
        if number in (1000, 2000):
            now = Opened(text, path, before=now)
            assert hints(now) == hints(Opened(text, path))
            gc.collect()
            if not tracemalloc.is_tracing():
                tracemalloc.start()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 5e6  # of what was allocated in the second thousand
