"""Specs on which the command line is tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spec.texts import BAD, GOOD


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with specs that are valid, invalid, no model, and not UTF-8."""
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "short.yaml").write_text(GOOD + "expect: {params: 1}\n")
    (tmp_path / "blocks.yaml").write_text("seqblocks: 1\nblocks: {b: {steps: [silu]}}\n")
    (tmp_path / "latin.yaml").write_bytes(b"seqblocks: 1\nabout: caf\xe9\n")
    return tmp_path
