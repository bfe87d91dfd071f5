"""docs/language/ and docs/blocks.md match the declarations, and the examples of combinators are valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqblocks.analysis import check
from seqblocks.combinators import COMBINATORS
from seqblocks.descriptions import reference
from seqblocks.language.spec import bundled

PAGE = (Path(__file__).parents[2] / "docs" / "language" / "combinators.md").read_text("utf-8")


def test_the_pages_match_the_declarations(root: Path, update_golden: bool) -> None:
    command = [sys.executable, "docs/reference.py", *([] if update_golden else ["--check"])]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 0, "run `python docs/reference.py` to update docs/language/"


def test_the_page_of_blocks_lists_all_bundled_blocks(root: Path, update_golden: bool) -> None:
    command = [sys.executable, "docs/blocks.py", *([] if update_golden else ["--check"])]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 0, "run `python docs/blocks.py` to update docs/blocks.md"
    page = (root / "docs" / "blocks.md").read_text("utf-8")
    listed = {file: check.load_spec(file)[0].blocks for file, path in bundled().items() if path.parent.name == "blocks"}
    assert re.findall(r"^### (\w+)$", page, re.M) == [name for blocks in listed.values() for name in blocks]


def examples() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.mark.parametrize("verb", COMBINATORS)
def test_examples_of_combinators_validate(verb: str) -> None:
    (example,) = [text for text in examples() if re.match(rf"(- linear: .*\n)?- {verb}:", text)]
    steps = "".join(f"    {line}\n" for line in example.splitlines())
    head = "seqblocks: 1\nuse: [vil]\nlet: {dim: 8}\nmodel:\n  input: {features: dim}\n  steps:\n"
    check.load_text(head + steps)


@pytest.mark.parametrize("name", reference.verbs())
def test_everything_is_documented(name: str) -> None:
    verb = reference.verbs()[name]
    assert reference.about(verb).endswith("."), "a docstring should be a sentence"
    assert all(argument.about for argument in reference.arguments(verb)), "every argument needs a description"
    assert all(port.about for port in reference.ports(verb))
    assert name in reference.text(verb)
