"""`seqblocks compare` and the facts of designs: against published figures, and against `summarise`."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import seqblocks
from seqblocks.architect.facts import FACTS, measure
from seqblocks.language.spec_files import bundled
from tests.spec.texts import GOOD

Run = Callable[..., subprocess.CompletedProcess[str]]
MODELS = [name for name, path in bundled().items() if path.parent.name == "models"]

# the parameters of Pythia, which embeds no positions and does not tie its head
PYTHIA = """
seqblocks: 1
let: {dim: 512, depth: 6, heads: 8, vocabulary: 50304}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: dim}
    - repeat:
        times: depth
        steps:
          - residual:
              steps:
                - layer_norm
                - linear: {features: 3 * dim, as: [q, k, v]}
                - attention: {q: q, k: k, v: v, heads: heads}
                - linear: {features: dim, name: out}
          - residual: {name: mlp, steps: [layer_norm, {linear: 4 * dim}, gelu, {linear: {features: dim, name: out}}]}
    - layer_norm
    - unembed: {bias: false}
"""


@pytest.mark.parametrize(
    ("overrides", "total", "without"),
    [  # Biderman et al. 2023 (arXiv:2304.01373), table 1 and the model cards
        ({}, 70_426_624, 18_915_328),
        ({"dim": 768, "depth": 12, "heads": 12}, 162_322_944, 85_056_000),
        ({"dim": 1024, "depth": 24, "heads": 16}, 405_334_016, 302_311_424),
    ],
)
def test_non_embedding_parameters_are_those_of_pythia(overrides: dict[str, int], total: int, without: int) -> None:
    model = seqblocks.load_text(PYTHIA, set=overrides)[1]
    assert model is not None
    assert measure(model, "params") == total
    assert measure(model, "non_embedding_params") == without


def test_positions_and_a_tied_head_are_embeddings() -> None:
    """GPT-2 small: 124,439,808 parameters; without 50257 and 1024 rows of 768 numbers."""
    (facts,) = seqblocks.compare("transformer_125m").facts
    assert facts["params"] == 124_439_808
    assert facts["non_embedding_params"] == 124_439_808 - (50257 + 1024) * 768
    assert facts["kv_bytes_per_token"] == 12 * 2 * 768 * 4
    assert seqblocks.compare("transformer_125m", dtype="bf16").facts[0]["kv_bytes_per_token"] == 12 * 2 * 768 * 2


@pytest.mark.parametrize(("of_queries", "of_keys", "expected"), [("h", "merged", 16), ("merged", "h", 64)])
def test_a_cache_grows_with_its_keys_not_with_the_queries(of_queries: str, of_keys: str, expected: int) -> None:
    """A key and a value of 8 numbers in float32 for each token, or for every fourth."""
    steps = f"""
    - embed: {{features: 8, as: h}}
    - downsample: {{factor: 4, method: mean, as: merged}}
    - linear: {{from: {of_queries}, features: 8, as: q}}
    - linear: {{from: {of_keys}, features: 8, as: k}}
    - linear: {{from: {of_keys}, features: 8, as: v}}
    - attention: {{q: q, k: k, v: v, heads: 2}}
"""
    model = seqblocks.load_text(f"seqblocks: 1\nmodel:\n  input: {{tokens: 16}}\n  steps:{steps}")[1]
    assert model is not None
    assert measure(model, "kv_bytes_per_token") == expected


@pytest.mark.parametrize(("axis", "size", "expected"), [("features", 4, 3 * 64), ("places", 3, 64)])
def test_a_cache_grows_for_all_sequences_that_each_makes(axis: str, size: int, expected: int) -> None:
    """Keys and values of 8 numbers in float32: of 3 groups of features at each token; of one of 3 places."""
    steps = f"""
    - each:
        axis: {axis}
        size: {size}
        steps: [{{linear: {{features: 24, as: [q, k, v]}}}}, {{attention: {{q: q, k: k, v: v, heads: 2}}}}]
"""
    model = seqblocks.load_text(f"seqblocks: 1\nmodel:\n  input: {{features: 12}}\n  steps:{steps}")[1]
    assert model is not None
    assert measure(model, "kv_bytes_per_token") == expected


def test_attention_costs_more_in_longer_sequences() -> None:
    """A token reads on average (length + 1) / 2 keys and as many values of 768 numbers, in each of 12 layers."""
    facts = seqblocks.compare("transformer_125m@context=4096", lengths=[1024, 4096]).facts[0]
    more = facts["macs_per_token@4096"] - facts["macs_per_token@1024"]
    assert more == 12 * 2 * 768 * (4096 - 1024) / 2
    # a spec that fixes its length takes no other
    images = seqblocks.compare("vil_tiny", lengths=1024).facts[0]
    assert images["macs_per_token@1024"] is None
    assert images["streams"] is False


@pytest.mark.parametrize("name", MODELS[::5])
def test_the_facts_are_those_of_the_summary(name: str) -> None:
    model = seqblocks.load_model(name)
    found = seqblocks.summarise(model)
    (facts,) = seqblocks.compare(model).facts
    for key in ("params", "active_params", "params_bytes", "macs_per_token", "state", "state_bytes", "input_macs"):
        assert facts[key] == getattr(found, key), key
    for key in ("flops_per_token", "lookahead", "latency"):
        assert facts[key] == getattr(found, key), key
    assert facts["streams"] == (found.streams is None)
    assert list(facts) == list(FACTS)


def test_overrides_of_one_design_and_of_all(run_main: Run, folder: Path) -> None:
    done = run_main("compare", "good.yaml", "good.yaml@dim=16", "--set", "model.linear.features=2", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["good.yaml", "good.yaml@dim=16"]
    assert lines[2].split() == ["parameters", "18", "34", "(1.89", "x)"]  # 2 * 8 + 2 and 2 * 16 + 2
    (folder / "odd@dim=4").mkdir()
    shutil.copy(folder / "good.yaml", folder / "odd@dim=4" / "good.yaml")
    assert run_main("compare", "odd@dim=4/good.yaml", cwd=folder).returncode == 0


def test_formats(run_main: Run, folder: Path) -> None:
    command = ("compare", "good.yaml", "good.yaml@dim=16")
    data = json.loads(run_main(*command, "--format", "json", cwd=folder).stdout)
    assert [spec["params"] for spec in data["specs"]] == [36, 68]
    rows = list(csv.DictReader(io.StringIO(run_main(*command, "--format", "csv", cwd=folder).stdout)))
    assert [(row["spec"], row["params"], row["latency"]) for row in rows] == [
        ("good.yaml", "36", "0"), ("good.yaml@dim=16", "68", "0"),
    ]  # fmt: skip
    table = run_main(*command, "--format", "markdown", cwd=folder).stdout.splitlines()
    assert table[:3] == ["|  | good.yaml | good.yaml@dim=16 |", "| :-- | --: | --: |", "| parameters | 36 | 68 |"]


def test_without_torch_and_from_standard_input(folder: Path) -> None:
    program = "import sys; from seqblocks.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "compare", "-", "vil_tiny"]
    done = subprocess.run(command, input=GOOD, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split() == ["parameters", "36", "6,088,360", "(169,121", "x)"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["bad.yaml", "short.yaml", "good.yaml"], 1, "did you mean 'linear'?"),
        (["good.yaml", "short.yaml"], 3, "E701"),
        (["good.yaml@dmi=4"], 1, "did you mean 'dim'?"),
        (["blocks.yaml"], 1, "the file defines blocks but no model"),
        (["absent.yaml"], 2, "cannot be read"),
        (["git:HEAD"], 2, "git:REV:PATH"),
        (["git:--all:good.yaml"], 2, "git:REV:PATH"),
        (["git:no_such_revision:good.yaml"], 2, "git has no no_such_revision:good.yaml"),
        (["good.yaml", "--length", "12,x"], 2, "is not a list of whole numbers"),
        (["good.yaml", "--length", "9" * 5000], 2, "is not a list of whole numbers"),
        (["good.yaml", "--dtype", "int7"], 2, "not a supported dtype"),
        (["-", "-"], 2, "can be read only once"),
        (["good.yaml", "--format", "github"], 2, "invalid choice"),
    ],
)
def test_faults(words: list[str], status: int, message: str, run_main: Run, folder: Path) -> None:
    done = run_main("compare", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_faults_of_all_specs_are_reported(run_main: Run, folder: Path) -> None:
    done = run_main("compare", "bad.yaml", "good.yaml@dim=no", cwd=folder)
    assert done.returncode == 1
    assert "linaer" in done.stderr
    assert "--set dim=no" in done.stderr


def test_a_file_of_a_git_revision(run_main: Run, tmp_path: Path) -> None:
    """The files that it uses are read from the same revision."""
    if shutil.which("git") is None:
        pytest.skip("needs git")

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "parts").mkdir()
    block = "seqblocks: 1\nblocks: {own: {args: {dim: int}, steps: [{linear: {features: dim}}]}}\n"
    (tmp_path / "parts" / "own.yaml").write_text(block)
    text = "seqblocks: 1\nuse: [./parts/own.yaml]\nmodel: {input: {features: 8}, steps: [{own: {dim: 4}}]}\n"
    (tmp_path / "spec.yaml").write_text(text)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "parts" / "own.yaml").write_text(block.replace("features: dim", "features: dim, bias: false"))
    done = run_main("compare", "git:HEAD:spec.yaml", "spec.yaml", "--format", "csv", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(",")[1] for line in done.stdout.splitlines()[1:]] == ["36", "32"]
    (tmp_path / "parts" / "own.yaml").unlink()
    assert run_main("compare", "git:HEAD:spec.yaml", cwd=tmp_path).returncode == 0
    done = run_main("compare", "git:HEAD:absent.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "git has no HEAD:absent.yaml" in done.stderr


def test_a_comparison_in_python() -> None:
    found = seqblocks.compare("mamba_130m", "mamba_370m")
    assert [each["params"] for each in found.to_dict()] == [129_135_360, 371_516_416]
    assert "371,516,416 (2.88 x)" in str(found)
    assert "<td" in found._repr_html_()
    with pytest.raises(seqblocks.UsageError, match="at least one spec"):
        seqblocks.compare()
    with pytest.raises(seqblocks.UsageError, match="lengths are whole numbers"):
        seqblocks.compare("mamba_130m", lengths=[0])
    with pytest.raises(seqblocks.UsageError, match="not int"):
        seqblocks.compare(3)
