"""Published architectures that are not bundled can be expressed, and have the published parameter counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqblocks import graph
from seqblocks.analysis import check

FOLDER = Path(__file__).parent / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_official_number_of_parameters(name: str) -> None:
    """The count is in the `expect:` of the file, which is checked."""
    model = check.load_model(str(FOLDER / f"{name}.yaml"))
    assert model.output


def test_all_releases_have_a_number() -> None:
    own_sizes = {"dual_path", "soundstream", "tcn", "wavenet"}  # sizes differ between implementations
    texts = {name: (FOLDER / f"{name}.yaml").read_text(encoding="utf-8") for name in NAMES}
    assert {name for name, text in texts.items() if "params:" not in text} == own_sizes


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROWS = re.findall(r"^\|[^|]*\| `([^`|]+)` \| `([^`|]+)` \| ([\d,]+) \|", PAGE.read_text(encoding="utf-8"), re.M)


def is_used(written: str, model: graph.Graph, text: str) -> bool:
    """Return whether a model has a step of a verb, or with an argument (`rotary.scaling`), or a wire of layers."""
    if written.startswith("layers"):
        return re.search(rf"from: \"?{re.escape(written)} or ", text) is not None
    verb, _, argument = written.partition(".")
    steps = [node for node in graph.walk(model) if node.verb == verb]
    return any(not argument or getattr(node.op, argument, None) not in (None, False) for node in steps)


@pytest.mark.parametrize("model", sorted({row[1] for row in ROWS}))
def test_models_of_the_table_use_what_it_says(model: str) -> None:
    name = str(PAGE.parents[1] / model) if "/" in model else model
    made = check.load_model(name)
    text = "".join(path.read_text(encoding="utf-8") for path in (FOLDER.parents[2] / "specs").rglob(f"{model}.yaml"))
    for written, _, count in (row for row in ROWS if row[1] == model):
        assert is_used(written, made.graph, text), written
        assert f"{graph.count(made.graph):,}" == count


def test_the_table_has_two_models_for_each_mechanism() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Models for each mechanism")[2].partition("\n## ")[0]
    first = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("|")][2:]
    starts = [at for at, mechanism in enumerate(first) if mechanism]
    assert len(first) == len(ROWS)
    assert all(end - start >= 2 for start, end in zip(starts, [*starts[1:], len(first)], strict=True))
