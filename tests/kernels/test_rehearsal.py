"""The GPU tests collect and run with the packages of a machine with a GPU, which has no pydantic."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_machine import as_on_a_gpu_machine, hidden_modules, plain_environment
from tests.kernels import rehearsal
from tests.kernels.conformance import INTERPRETED

MODELS = ("tests/torch/test_stream.py", "tests/torch/test_models_on_device.py")
SLOW_ONES = "test_gradients_at_any_number_of_warps or test_the_same_bits_every_time"


def test_the_environment_lacks_what_kernels_do_not_need() -> None:
    hidden = hidden_modules()
    assert "pydantic" in hidden
    assert not hidden & {"torch", "triton", "numpy", "yaml", "einops", "_pytest", "xdist", "hypothesis", "seqblocks"}


@INTERPRETED
@pytest.mark.parametrize(
    "left_out", [pytest.param(SLOW_ONES, marks=pytest.mark.slow), pytest.param("nothing", marks=pytest.mark.long)]
)
def test_gpu_tests_need_no_other_packages(left_out: str, root: Path, tmp_path: Path) -> None:
    """Every GPU test is collected, and one case of each runs in the interpreter, unless only a device can run it."""
    words = ["-k", f"not ({left_out})", "tests/kernels", *MODELS]
    output = rehearsed(words, root, as_on_a_gpu_machine(root, tmp_path))
    assert (passed := re.search(r"(\d+) passed, 2 skipped", output)), output  # skipped: MODELS
    assert int(passed[1]) >= (16 if left_out == SLOW_ONES else 18)


@pytest.mark.slow
def test_models_run_where_pydantic_is_installed(root: Path) -> None:
    """Tests of models on a device run on the CPU: one model, one that generates, and all newer steps."""
    pytest.importorskip("pydantic", reason="builds models, which need pydantic")
    output = rehearsed([*MODELS], root, {**plain_environment(), "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"})
    assert (passed := re.search(r"(\d+) passed", output)), output
    assert int(passed[1]) >= 8
    assert "skipped" not in output.splitlines()[-1]


def rehearsed(words: list[str], root: Path, env: dict[str, str]) -> str:
    """Return the output of the rehearsal of some tests."""
    command = [sys.executable, "-m", "pytest", "-p", rehearsal.__name__, "-p", "no:cacheprovider", "-m", "gpu", "-v"]
    done = subprocess.run(
        [*command, *words], cwd=root, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
