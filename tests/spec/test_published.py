"""Published architectures that are not bundled can be expressed, and have the published parameter counts."""

from __future__ import annotations

from pathlib import Path

import pytest

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
