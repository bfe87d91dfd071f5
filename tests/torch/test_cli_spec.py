"""`seqblocks spec`: the spec of a config.json, or the nearest family's as a start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqblocks.checkpoint.families import spec_text

Run = Callable[..., subprocess.CompletedProcess[str]]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_spec_is_that_of_from_pretrained(run_main: Run, tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    done = run_main("spec", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip() == spec_text(LLAMA).rstrip()
    assert run_main("spec", "config.json", "--out", "mine.yaml", cwd=tmp_path).stdout == ""
    assert run_main("check", "mine.yaml", cwd=tmp_path).returncode == 0
    again = run_main("spec", ".", "--out", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_an_unknown_model_begins_as_the_nearest_family(run_main: Run, tmp_path: Path) -> None:
    written(tmp_path, {**LLAMA, "model_type": "lama3b", "wobble": 3, "quibble": None})
    done = run_main("spec", ".", "--out", "start.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "llama is the nearest" in (tmp_path / "start.yaml").read_text()
    assert "wobble" in done.stderr
    assert "quibble" not in done.stderr
    assert run_main("check", "start.yaml", cwd=tmp_path).returncode == 0
    data = json.loads(run_main("spec", ".", "--format", "json", cwd=tmp_path).stdout)
    assert data["ok"] is False
    assert len(data["notes"]) == 2


def test_the_language_model_of_a_model_that_reads_images(run_main: Run, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = {"model_type": "gemma3", "text_config": sizes}
    done = run_main("spec", ".", cwd=written(tmp_path, config))
    assert (done.returncode, done.stderr) == (0, "")
    assert "language_model.model.layers" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": []}', "no known family"),
        ("[]", "is not a mapping"), ("{", "is not JSON"), ('{"model_type": "x"}', "no known family"),
        ("{}", "no model_type"),
    ],
)  # fmt: skip
def test_faults(text: str, message: str, run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    done = run_main("spec", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "cannot be read" in run_main("spec", "absent", cwd=tmp_path).stderr
