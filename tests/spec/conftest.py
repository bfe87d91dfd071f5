"""Specs on which the command line is tested; tests with a server that is not installed are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spec import language_server
from tests.spec.texts import BAD, GOOD


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with_server = [item for item in items if item.get_closest_marker("yaml_server")]
    if with_server and not language_server.executable():
        if "yaml_server" in config.option.markexpr:  # asked for, so each says why it does not run
            reason = f"npm install yaml-language-server, or set {language_server.VARIABLE}"
            for item in with_server:
                item.add_marker(pytest.mark.skip(reason=reason))
        else:
            config.hook.pytest_deselected(items=with_server)
            items[:] = [item for item in items if not item.get_closest_marker("yaml_server")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with specs that are valid, invalid, no model, and not UTF-8."""
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "short.yaml").write_text(GOOD + "expect: {params: 1}\n")
    (tmp_path / "blocks.yaml").write_text("seqblocks: 1\nblocks: {b: {steps: [silu]}}\n")
    (tmp_path / "latin.yaml").write_bytes(b"seqblocks: 1\nabout: caf\xe9\n")
    return tmp_path
