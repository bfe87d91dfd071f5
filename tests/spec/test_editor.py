"""What an editor shows of a spec, as functions without a protocol."""

from __future__ import annotations

import contextlib
import gc
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqblocks import graph
from seqblocks.editor import diagnostics, navigation, rename
from seqblocks.editor.completion import complete
from seqblocks.editor.edits import applied
from seqblocks.editor.fixes import QuickFix, fixes
from seqblocks.editor.hints import hints
from seqblocks.editor.hover import hover
from seqblocks.editor.lens import lenses
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.symbols import Symbol, symbols
from seqblocks.errors import Diagnostic, Span
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled
from tests.spec.opened import HEAD, SOME, TWO, ends, opened, spot_of, starts

FAULTS = sorted((Path(__file__).parents[1] / "golden" / "faults").glob("*.yaml"))
FAULTS = [path for path in FAULTS if not path.stem.endswith("not_utf8")]  # an editor decodes the text


# --- hints, outline, hover, navigation --------------------------------------------------------------------------------


def nested(outline: list[Symbol], around: Span | None = None) -> None:
    for each in outline:
        assert starts(each.span) <= starts(each.own)
        assert ends(each.own) <= ends(each.span)
        if around:
            assert starts(around) <= starts(each.span)
            assert ends(each.span) <= ends(around)
        nested(each.children, each.span)


@pytest.mark.parametrize("name", sampled(sorted(bundled()), ci=4, first=3))
def test_everything_is_known_of_bundled_files(name: str) -> None:
    path = bundled()[name]
    found = opened(path.read_text("utf-8"), path)
    nested(symbols(found))
    shown = {hint.spot.line for hint in hints(found)}
    assert shown == {step.span.line for step in found.steps if found.is_own(step.span)}
    for span, reference in found.own_references.items():
        about = hover(found, Spot(span.line, span.column))
        assert about is not None
        assert reference.name in about.text
        assert about.span == span
        if reference.definition:
            assert navigation.definition(found, Spot(span.line, span.column)) == reference.definition
            if found.is_own(reference.definition):
                others = navigation.occurrences(found, Spot(*starts(reference.definition)))
                assert span in others


def test_hints_and_definitions_stay_where_lines_did_not_change() -> None:
    good = opened(HEAD + "    - silu\n    - linear: {from: x, features: dim}\n")
    text = good.text.replace("    - silu\n", "    - {silu\n\n")
    broken = opened(text, before=good)
    assert broken.analysis.file is None
    assert [(hint.spot.line, hint.text) for hint in hints(broken)][-1] == (17, "[batch, seq, 64] · 8,256 parameters")
    assert not any(hint.spot.line in (15, 16) for hint in hints(broken))
    assert navigation.definition(broken, spot_of(text, "x, features: dim}")) == Span(broken.source, 14, 36, 14, 37)
    again = opened(text.replace("{silu", "{silu, "), before=broken)
    assert hints(again) == hints(broken)


def test_a_hint_is_of_a_step_with_a_type() -> None:
    found = opened(HEAD + "    - slu\n    - linear: {features: 3}\n")
    assert [hint.spot.line for hint in hints(found) if hint.spot.line > 13] == [14]


def test_keys_of_calls_lead_to_the_arguments_and_their_descriptions() -> None:
    text = TWO + "  # end\n"
    found = opened(text)
    place = navigation.definition(found, spot_of(text, "width: dim, body: [{"))
    assert place is not None
    assert (place.line, place.text) == (5, "width")
    about = hover(found, spot_of(text, "features: dim, as: q}"))
    assert about is not None
    assert about.text.startswith("**features** = `8`\n\nwhole number, at least 1 (required). ")
    assert hover(found, spot_of(text, "# kept")) is None


def test_a_figure_that_is_expected_shows_that_of_the_model() -> None:
    text = HEAD + "expect: {params: 12}\n"
    about = hover(opened(text), spot_of(text, "params"))
    assert about is not None
    assert about.text == "**params**\n\nthe model has 8,320"


# --- rename -----------------------------------------------------------------------------------------------------------

def renamed(text: str, word: str, new: str, path: Path | None = None) -> str:
    now = opened(text, path)
    return applied(text, rename.rename(now, spot_of(text, word), new))


def test_a_wire_keeps_the_name_of_its_step() -> None:
    expected = TWO.replace("as: q}", "name: q, as: query}").replace("from: q,", "from: query,")
    assert renamed(TWO, "q}", "query") == expected
    assert renamed(TWO, "q, by", "query") == expected
    assert renamed(TWO, "r}\n    - mine", "s") == TWO.replace("as: r", "as: s").replace("by: r", "by: s")


def test_a_wire_in_block_style_keeps_the_name_of_its_step() -> None:
    old = "    - linear: {features: dim, as: q}   # kept\n"
    block = "    - linear:\n        features: dim\n        as: q\n"
    text = TWO.replace(old, block)
    new = block.replace("as: q", "name: q\n        as: query")
    assert renamed(text, "q, by", "query") == text.replace(block, new).replace("from: q,", "from: query,")


def test_a_name_is_renamed_in_expressions_and_expectations() -> None:
    assert renamed(TWO, "dim: 8", "size") == TWO.replace("dim", "size")


def test_a_name_is_renamed_in_all_blocks_that_share_a_step_by_an_alias() -> None:
    block = "  NAME:\n    args: {width: int}\n    steps: [STEP, silu]\n"
    one = block.replace("NAME", "one").replace("STEP", "&kept {linear: {features: width}}")
    text = f"seqblocks: 1\nblocks:\n{one}{block.replace('NAME', 'two').replace('STEP', '*kept')}"
    for at in (3, 6):  # the definition in either block
        word = text.splitlines(keepends=True)[at]
        now = opened(text, None)
        edits = rename.rename(now, Spot(at + 1, word.index("width") + 1), "size")
        assert applied(text, edits) == text.replace("width", "size")


def test_a_state_is_renamed_with_the_step_that_sets_it() -> None:
    cell = "    - cell: {state: {s: dim}, steps: [{calc: {s: a * s + x, learned: {a: 1}}}, {silu: {from: s}}]}\n"
    text = TWO.replace("expect:", cell + "expect:")
    changed = cell.replace("{s: dim}", "{sum: dim}").replace("{s: a * s", "{name: s, sum: a * sum")
    changed = changed.replace(": s}", ": sum}")
    for word in ("s: dim}, steps", "s + x"):
        assert renamed(text, word, "sum") == text.replace(cell, changed)


def test_a_formula_keeps_the_name_of_its_scalars() -> None:
    old = "    - calc: {y: a * x, learned: {a: 1}}\n    - add: {with: y}\n"
    new = "    - calc: {name: y, z: a * x, learned: {a: 1}}\n    - add: {with: z}\n"
    text = TWO.replace("expect:", old + "expect:")
    assert renamed(text, "y}\nexpect", "z") == text.replace(old, new)


def test_an_argument_is_renamed_in_calls() -> None:
    assert renamed(TWO, "width: int", "size") == TWO.replace("width", "size")


def test_a_block_keeps_the_names_of_its_steps() -> None:
    done = renamed(TWO, "mine:", "other")
    assert done == TWO.replace("mine: {", "other: {name: mine, ").replace("  mine:\n", "  other:\n")
    body = renamed(TWO, "body: steps", "inner")
    assert "      - inner: {name: body}\n" in body
    assert "inner: [layer_norm]" in body


@pytest.mark.parametrize(
    ("word", "new", "reason"),
    [
        ("linear", "lin", "a verb of the language"),
        ("q}", "r", "'r'"),
        ("q}", "2q", "not a valid name"),
        ("q}", "as: x", "cannot become"),
        ("dim: 8", "depth x", "cannot become"),
        ("mine:", "linear", "built-in verb"),
        ("input:", "x", "no wire, name or block"),
        ("# kept", "x", "no wire, name or block"),
    ],
)
def test_a_rename_that_changes_the_model_is_refused(word: str, new: str, reason: str) -> None:
    with pytest.raises(rename.Refused, match=reason):
        renamed(TWO, word, new)


def test_names_of_inputs_outputs_and_other_files_are_refused() -> None:
    path = bundled()["captioner"]
    with pytest.raises(rename.Refused, match="calls of the built model use its name"):
        renamed(path.read_text("utf-8"), "image:", "picture", path)
    path = bundled()["memoroid_actor_critic"]
    with pytest.raises(rename.Refused, match="is an output of the model"):
        renamed(path.read_text("utf-8"), "policy}", "choice", path)
    path = bundled()["jamba_small"]
    with pytest.raises(rename.Refused, match="rename it there"):
        renamed(path.read_text("utf-8"), "prenorm: {", "pre", path)


def names_of_parameters(found: Opened) -> list[tuple[str, tuple[int, ...]]]:
    body = found.analysis.lowered.body
    return [(each.name, each.parameter.shape) for each in graph.parameters(body)] if body else []


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_what_is_renamed_in_bundled_files_gives_the_same_parameters(name: str) -> None:
    path = bundled()[name]
    found = opened(path.read_text("utf-8"), path)
    definitions = {each.definition for each in found.own_references.values() if each.definition}
    own = sorted(span for span in definitions if found.is_own(span))
    done = 0
    for span in random.Random(name).sample(own, 8):
        try:
            edits = rename.rename(found, Spot(*starts(span)), "w17")
        except rename.Refused:
            continue  # an alias reads the name in several blocks, or it is that of an input
        changed = opened(applied(found.text, edits), path)
        assert names_of_parameters(changed) == names_of_parameters(found)
        assert changed.analysis.ok
        untouched = [line for line in found.text.splitlines() if line in changed.text.splitlines()]
        assert len(untouched) >= len(found.text.splitlines()) - len(edits)
        done += 1
    assert done >= 4


# --- quick fixes, lens, links -----------------------------------------------------------------------------------------


def all_fixes(found: Opened) -> list[QuickFix]:
    return fixes(found, Spot(1, 1), Spot(10**6, 1))


@pytest.mark.parametrize("path", sampled(FAULTS), ids=lambda path: path.stem)
def test_a_fix_removes_its_fault(path: Path) -> None:
    """Each suggestion for a word of the file has a quick fix, which removes the fault."""
    found = opened(path.read_text("utf-8"), path)
    suggested = [each for each in found.analysis.diagnostics if each.fix and each.fix.span in _own_spans(found, each)]
    offered = all_fixes(found)
    assert {id(each) for each in suggested} <= {id(fix.diagnostic) for fix in offered}
    for fix in offered:
        changed = opened(applied(found.text, fix.edits), path)
        same = [each for each in changed.analysis.diagnostics if _described(each) == _described(fix.diagnostic)]
        assert len(same) < sum(_described(each) == _described(fix.diagnostic) for each in found.analysis.diagnostics)


def _described(each: Diagnostic) -> tuple[str, str, int]:
    return each.code, each.message, each.span.line if each.span else 0


def _own_spans(found: Opened, each: Diagnostic) -> list[Span]:
    return [each.fix.span] if each.fix and each.fix.span and each.span and found.is_own(each.span) else []


def test_a_clash_of_names_and_a_wrong_number_have_fixes() -> None:
    text = HEAD + "    - linear: 64\n    - linear: {features: 64}\nexpect: {params: 12}\n"
    (fix,) = all_fixes(opened(text))
    assert fix.title == "Add `name: linear_2`"
    better = applied(text, fix.edits)
    assert "    - linear: {name: linear_2, features: 64}\n" in better
    (fix,) = all_fixes(opened(better))
    assert fix.title == "Set `params` to 20,736"
    best = applied(better, fix.edits)
    assert "expect: {params: 20_736}" in best
    assert opened(best).analysis.ok


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("linear: {bias: false}", ["features: dim, bias: false", "features: wide, bias: false"]),
        ("{linear: {}}", ["{linear: {features: dim}}", "{linear: {features: wide}}"]),
        ("linear", ["linear: {features: dim}", "linear: {features: wide}"]),
        ("gate: {activation: silu}", ["{by: input", "{by: x"]),
        ("residual:", ["residual: {steps: [identity]}"]),
        ("dropout: {p: 1.5}", ["p: 0"]),
        ("linear: {features: 0}", ["features: 1"]),
        ("linear: {features: 8 - dim}", ["features: 1"]),
        ("causal_conv: {kernel: -1}", ["kernel: 1"]),
        ("unembed", ["unembed: {vocabulary: dim}", "unembed: {vocabulary: wide}"]),
    ],
)
def test_missing_and_invalid_values_have_fixes(step: str, expected: list[str]) -> None:
    text = f"{HEAD}    - {step}\n"
    found = opened(text)
    done = [applied(text, fix.edits) for fix in all_fixes(found)]
    assert len(done) == len(expected)
    for each, part in zip(sorted(done), sorted(expected), strict=True):
        assert part in each
        codes = {diagnostic.code for diagnostic in opened(each).analysis.diagnostics}
        assert not codes & {"E202", "E209", "E203", "E302"}


def test_the_lens_shows_the_totals_of_a_valid_model() -> None:
    (lens,) = lenses(opened(HEAD))
    assert lens.text == "[batch, seq, 64] → [batch, seq, 128] · 8,320 parameters"
    assert lens.span.text == "model"
    assert lenses(opened(HEAD + "    - slu\n")) == []


def test_used_files_are_links(tmp_path: Path) -> None:
    found = opened("seqblocks: 1\nuse: [prenorm, ./mine.yaml, nothing]\n", tmp_path / "spec.yaml")
    files = [(span.text, file.source.name) for span, file in navigation.links(found)]
    assert files == [("prenorm", "<bundled prenorm>"), ("./mine.yaml", str(tmp_path / "mine.yaml"))]


# --- any text ---------------------------------------------------------------------------------------------------------


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str, int]:
    """Draw a text, the text after an edit, and an offset in it."""
    path = draw(st.sampled_from(FAULTS)) if draw(st.booleans()) else bundled()[draw(st.sampled_from(SOME))]
    good = path.read_text("utf-8")
    start = draw(st.integers(0, len(good)))
    end = draw(st.integers(start, min(len(good), start + 30)))
    text = good[:start] + draw(st.text("{}[]:,-# \n\t'\"&*a1🙂", max_size=4)) + good[end:]
    near = st.integers(max(start - 40, 0), min(start + 40, len(text)))
    return good, text, draw(near)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(edited())
def test_any_text_has_an_answer(drawn: tuple[str, str, int]) -> None:
    good, text, offset = drawn
    now = opened(text, before=opened(good))
    spot = now.lines.spot_at(offset)
    nested(symbols(now))
    complete(now, spot)
    hover(now, spot)
    lenses(now)
    for fix in all_fixes(now):
        assert applied(text, fix.edits) != text
    with contextlib.suppress(rename.Refused):
        rename.rename(now, spot, "w17")
    for span in (navigation.definition(now, spot), *navigation.references(now, spot)):
        assert span is None or starts(span) <= ends(span)
    for hint in hints(now):
        assert now.lines.spot_at(now.lines.offset_of(hint.spot)) == hint.spot
    for found in diagnostics.by_file(now).values():
        for _, diagnostic in found:
            assert diagnostics.message(diagnostic)


@pytest.mark.slow
def test_many_edits_leave_nothing_behind() -> None:
    """Two equal rounds of edits: what the second one allocates is given back, except for caches of bounded size."""
    path = bundled()["mamba"]
    good = path.read_text("utf-8")
    sizes = []
    now = opened(good, path)
    for _ in range(2):
        draw, text = random.Random(1), good
        for number in range(150):
            at = draw.randrange(len(text))
            word, removed = draw.choice(["", "a", "{", " ", "\n", "- ", ": "]), draw.choice([0, 0, 1, 9])
            text = text[:at] + word + text[at + removed :]
            now = opened(good if number % 25 == 24 else text, path, now)
            hints(now)
            complete(now, now.lines.spot_at(min(at, len(now.text))))
        assert [hint.spot for hint in hints(now)] == [hint.spot for hint in hints(opened(good, path))]
        gc.collect()
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # an analysis of this file takes a third of a megabyte: 150 of them would be far more
    assert sizes[1] - sizes[0] < 8e6


def test_names_of_steps_are_followed_and_not_renamed() -> None:
    text = (
        "seqblocks: 1\nblocks:\n  twin:\n    outputs: [y]\n    steps:\n      - linear: {features: 8, as: y}\n"
        "      - linear: {features: 8}\nmodel:\n  input: {tokens: 9}\n  steps:\n    - embed: {features: 8}\n"
        "    - twin: {as: first}\n    - add: {with: first.y}\n    - linear: {features: 9, bias: false, tie: embed}\n"
    )
    now = opened(text)
    assert now.analysis.ok
    spot = Spot(14, text.split("\n")[13].index("tie: embed") + 7)
    found = navigation.definition(now, spot)
    assert found
    assert starts(found) == (11, 7)
    assert [each.line for each in navigation.occurrences(now, Spot(11, 8))] == [11, 14]
    with pytest.raises(rename.Refused, match="name of a step"):
        rename.rename(now, spot, "other")
    part = Spot(13, text.split("\n")[12].index("first.y") + 7)
    changed = applied(text, rename.rename(now, part, "w17"))
    assert "outputs: [w17]" in changed
    assert "with: first.w17" in changed
    assert opened(changed).analysis.ok
