"""The catalogue lists exactly the codes that the package reports, and its examples are correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqblocks.analysis import check
from seqblocks.cli.codes import CODES, text
from seqblocks.errors import SpecError

FRAME = "seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n"


def as_complete_spec(example: str) -> str:
    """Return an example as a complete spec. An example that begins with a step becomes a model on 8 features."""
    if not example.startswith("- "):
        return example
    return FRAME + "".join(f"    {line}\n" for line in example.splitlines())


def test_the_catalogue_lists_exactly_the_codes_in_use(root: Path) -> None:
    sources = [p for folder in ("seqblocks", "cli") for p in (root / folder).rglob("*.py") if p.name != "codes.py"]
    used = {code for path in sources for code in re.findall(r'"([EW]\d{3})"', path.read_text(encoding="utf-8"))}
    assert used == set(CODES)


@pytest.mark.parametrize("code", [code for code, known in CODES.items() if known.example])
def test_examples_report_their_code_and_fixed_examples_do_not(code: str) -> None:
    known = CODES[code]
    with pytest.raises(SpecError) as caught:
        check.load_text(as_complete_spec(known.example), strict=True)
    assert [d.code for d in caught.value.diagnostics] == [code]
    check.load_text(as_complete_spec(known.fix), strict=True)


@pytest.mark.parametrize("code", CODES)
def test_what_explain_prints(code: str) -> None:
    assert text(code).startswith(f"{code}: {CODES[code].title}")
    assert CODES[code].about.endswith((".", ")."))


def test_every_code_that_a_file_can_get_has_a_snapshot(root: Path) -> None:
    golden = "".join(p.read_text(encoding="utf-8") for p in (root / "tests" / "golden" / "faults").glob("*.txt"))
    seen = set(re.findall(r"(?:error|warning)\[([EW]\d{3})\]", golden))
    assert set(CODES) - seen == {"E310", "E803", "W901"}, "codes of the command line are tested in test_cli.py"
