"""Any text is either accepted or gets diagnostics, without other exceptions, in bounded time and memory."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqblocks.analysis import check
from seqblocks.errors import SpecError
from seqblocks.language.spec_files import bundled
from tests.spec.seconds import in_time

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")  # some of these specs are invalid on purpose


def checked(text: str, **options: Any) -> SpecError | None:
    error: SpecError | None = None
    with in_time(f"{len(text):,} characters"):
        try:
            check.load_text(text, **options)
        except SpecError as caught:
            error = caught
    if error:
        assert error.diagnostics, "an error without a diagnostic"
        for span in (diagnostic.span for diagnostic in error.diagnostics):
            if span:
                assert 1 <= span.line <= len(span.source.lines) + 1
                assert 1 <= span.column <= len(span.source.line(span.line)) + 2
    return error


SPECS = [path.read_text(encoding="utf-8") for path in bundled().values() if path.stat().st_size < 5000]
TOKENS = [
    "", "0", "-1", "1e9", "[]", "{}", "null", "true", "input", "x", "steps", "from", "as", "reverse", "[q, k]", "*a",
    "&a x", "!!int 3", "{a: b}", "- silu", "1/0", "dim +", "'", '"', "\t", "é", "\u2028", "{", "]", ":", "<<: {a: 1}",
]  # fmt: skip


def mutated(text: str, seed: int) -> str:
    """Return a bundled spec with a few random edits."""
    chance = random.Random(seed)
    lines = text.splitlines()
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(lines)) if lines else 0
        match chance.randrange(7):
            case 0 if lines:
                del lines[at]
            case 1 if lines:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2 if lines:
                other = chance.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case 3 if lines:
                words = lines[at].split(" ")
                words[chance.randrange(len(words))] = chance.choice(TOKENS)
                lines[at] = " ".join(words)
            case 4 if lines:
                lines[at] = " " * chance.randint(0, 3) + lines[at]
            case 5 if lines and lines[at]:
                cut = chance.randrange(len(lines[at]))
                lines[at] = lines[at][:cut] + chance.choice(TOKENS) + lines[at][cut + chance.randint(0, 3) :]
            case _:
                lines.insert(at, chance.choice(TOKENS))
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(SPECS), st.integers(0, 10**9))
def test_mutated_specs(text: str, seed: int) -> None:
    checked(mutated(text, seed))


@settings(max_examples=150)
@given(st.text(max_size=200))
def test_random_text(text: str) -> None:
    assert checked(text) is not None


WORDS = """seqblocks about use let blocks model input steps args expect checkpoint from as name init tie residual scan
repeat parallel linear mlstm pool embed vil features tokens image pattern times order merge own branches m s"""
words = st.sampled_from(sorted(set(WORDS.split())))
leaves = words | st.integers(-2, 10**6) | st.floats() | st.booleans() | st.none() | st.text(max_size=8)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(words, t, max_size=4), max_leaves=25)


@settings(max_examples=100)
@given(trees, trees)
def test_random_structures(steps: Any, other: Any) -> None:
    from seqblocks.language.overrides import as_text

    head = "seqblocks: 1\nuse: [vil]\n"
    checked(f"{head}model: {{input: {{features: 8}}, steps: [{as_text(steps)}]}}\n")
    checked(f"{head}let: {as_text(other)}\nmodel: {as_text(steps)}\n")
    checked(f"{head}blocks: {{b: {{args: {as_text(other)}, steps: {as_text(steps)}}}}}\n")
    checked(as_text(steps))


@pytest.mark.slow
@settings(max_examples=100)
@given(st.text(max_size=20), st.text(max_size=20) | st.integers() | st.lists(st.integers(), max_size=3))
def test_random_overrides(path: str, value: Any) -> None:
    checked(SPECS[0], set={path: value})
    checked(SPECS[0], set={f"let.{path}": check.yaml(str(value))})


MILLION = 10**6
FRAME = "seqblocks: 1\nmodel: {input: {features: 8}, steps: ["
HOSTILE = {
    "a line of a megabyte": "seqblocks: 1\nabout: " + "x" * MILLION + "\nmodle: 1\n",
    "a key of a megabyte": "seqblocks: 1\n? " + "x" * MILLION + "\n: 1\n",
    "brackets": "[" * MILLION,
    "braces": "{" * MILLION,
    "dashes": "- " * (MILLION // 2),
    "question marks": "? " * (MILLION // 2),
    "anchors": "".join(f"a{i}: &a{i} {i}\n" for i in range(40_000)),
    "keys": "seqblocks: 1\nlet:\n" + "".join(f"  k{i}: {i}\n" for i in range(40_000)),
    "unknown keys": "".join(f"k{i}: {i}\n" for i in range(40_000)),
    "indentation": "\n".join(" " * i + "a:" for i in range(1000)),
    "quotes": '"' * MILLION,
    "a number": "seqblocks: " + "9" * MILLION,
    "an exponent": "seqblocks: 1e" + "9" * 1000,
    "a hash": "seqblocks: 1\nlet: {a: " + "(" * 100_000 + "}\n",
    "an expression": FRAME + "{linear: {features: " + "1 + " * 100_000 + "1}}]}\n",
    "powers": FRAME + "{linear: {features: 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2}}]}\n",
    "nested parentheses": FRAME + "{linear: {features: " + "(" * 180 + "1" + ")" * 180 + "}}]}\n",
    "steps": FRAME + "silu, " * 60_000 + "silu]}\n",
    "repeats of repeats": FRAME
    + "{repeat: {times: 4096, steps: [{repeat: {times: 4096, steps: [{repeat: {times: 4096, steps: [silu]}}]}}]}}]}\n",
    "blocks of repeats": "seqblocks: 1\nblocks:\n"
    + "".join(f"  b{i}: {{steps: [{{repeat: {{times: 4096, steps: [b{i + 1}]}}}}]}}\n" for i in range(4))
    + "  b4: {steps: [silu]}\nmodel: {input: {features: 8}, steps: [b0]}\n",
    "aliases of steps": "seqblocks: 1\nlet: {a: &a [silu, silu, silu, silu]}\n"
    + "b: &b [*a,*a,*a,*a]\n" * 1
    + "c: [*b,*b]\n",
    "a pattern": FRAME + "{repeat: {pattern: " + "m*4000 " * 5000 + ", m: [silu]}}]}\n",
    "a wide model": FRAME + "{linear: {features: 10 ** 18}}, {linear: {features: 10 ** 18, name: b}}]}\n",
    "nul": "seqblocks: 1\x00",
    "surrogate": "seqblocks: 1\nabout: \ud800\n",
    "line separators": "seqblocks: 1\u2028model: 1\u2029let: 2\x85use: 3\n",
    "only a mark": "\ufeff",
    "directives": "%YAML 1.1\n---\nseqblocks: 1\n",
    "many documents": "---\n" * 50_000,
    "comments": "#" * MILLION,
}


LONGEST = ("steps", "repeats of repeats")  # 3 s each; test_memory_stays_bounded takes them too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONGEST else ()) for name in HOSTILE]
)
def test_hostile_texts(name: str) -> None:
    checked(HOSTILE[name])


@pytest.mark.slow
def test_memory_stays_bounded() -> None:
    """All hostile texts in one process use at most 1 GB of address space more than Python itself."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({2**30 + 2**28}, {2**30 + 2**28}))
from tests.spec.test_fuzz import HOSTILE, checked
for text in HOSTILE.values():
    checked(text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
