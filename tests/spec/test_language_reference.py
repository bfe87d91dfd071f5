"""docs/language.md is what the declarations say, and its examples hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqblocks.analysis import check
from seqblocks.errors import Report, Source
from seqblocks.language import document
from seqblocks.op import Op
from seqblocks.report import reference


def test_the_page_is_what_the_declarations_say(root: Path, update_golden: bool) -> None:
    page = root / "docs" / "language.md"
    if update_golden:
        page.write_text(reference.markdown(), encoding="utf-8")
    remake = "python -m seqblocks.report.reference > docs/language.md"
    assert page.read_text(encoding="utf-8") == reference.markdown(), remake


def test_complete_examples_validate() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", reference.markdown(), re.S | re.M)
    complete = [block for block in blocks if block.startswith("seqblocks:")]
    assert complete
    for text in complete:
        check.load_text(text)
    for text in blocks:
        report = Report()
        document.parse(Source.of("example", text), report)
        report.raise_if_any()


@pytest.mark.parametrize("verb", reference.EXAMPLES)
def test_examples_of_combinators_validate(verb: str) -> None:
    steps = "".join(f"    {line}\n" for line in reference.EXAMPLES[verb].splitlines())
    head = "seqblocks: 1\nuse: [vil]\nlet: {dim: 8}\nmodel:\n  input: {features: dim}\n  steps:\n"
    check.load_text(head + steps)


@pytest.mark.parametrize("name", reference.verbs())
def test_everything_is_documented(name: str) -> None:
    verb = reference.verbs()[name]
    told = reference.facts(verb)
    assert told["about"].endswith("."), "a docstring is a sentence"
    assert all(argument["about"] for argument in told["arguments"]), "every argument says what it is"
    if issubclass(verb, Op):
        assert all(port["about"] for port in told["inputs"])
    assert name in reference.text(verb)
