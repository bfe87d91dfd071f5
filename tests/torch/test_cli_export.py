"""`seqblocks export`: what it writes and prints, where weights come from, and its exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch

import seqblocks
from seqblocks.cli.main import main

SPEC = "seqblocks: 1\nlet: {width: 3}\nmodel: {input: {features: 4}, steps: [{linear: width}]}\n"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.slow
def test_onnx_with_the_weights_of_a_folder(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is given by a spec and `--weights`, or by the folder itself."""
    model = seqblocks.build(spec, seed=7)
    seqblocks.save(model, tmp_path / "saved")
    file = str(tmp_path / "m.onnx")
    assert main(["export", str(spec), "--onnx", file, "--weights", str(tmp_path / "saved")]) == 0
    assert "written, graph forward of m, " in (printed := capsys.readouterr().out)
    assert "differs from the model by " in printed
    x = torch.randn(2, 5, 4)
    found = onnxruntime.InferenceSession(file).run(None, {"input": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach())
    assert main(["export", str(tmp_path / "saved"), "--onnx", file, "--format", "json", "--no-check"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["difference"] is None
    assert data["contract"]["outputs"] == [{"name": "output", "shape": ["batch", "seq", 3], "dtype": "float32"}]
    assert json.loads(onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map["seqblocks"]) == (
        data["contract"]
    )


def test_the_spec_of_a_saved_model_with_other_weights(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has the spec and its overrides; `--weights` may also name that folder itself."""
    saved, other, file = tmp_path / "saved", seqblocks.build(spec, set={"width": 6}, seed=2), tmp_path / "m.pt2"
    seqblocks.save(seqblocks.build(spec, set={"width": 6}, seed=1), saved)
    seqblocks.save(other, tmp_path / "other")
    x = torch.ones(1, 2, 4)
    for weights, model in ((saved, seqblocks.load(saved)), (tmp_path / "other", other)):
        assert main(["export", str(saved), "--weights", str(weights), "--pt2", str(file)]) == 0, capsys.readouterr()
        torch.testing.assert_close(torch.export.load(file).module()(x), model(x))


def test_a_step_with_drawn_weights(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(spec), "--pt2", str(tmp_path / "m.pt2"), "--step", "--batch", "2", "--set", "width=6"]
    assert main([*words, "--seed", "3"]) == 0
    assert "no --weights given: the weights are random, with --seed 3" in capsys.readouterr().err
    x = torch.ones(2, 4)
    y, state = torch.export.load(tmp_path / "m.pt2").module()(x, {})
    torch.testing.assert_close(y, seqblocks.build(spec, seed=3, set={"width": 6}).step(x)[0])
    assert state == {}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["{spec}"], 2, "one of the arguments --onnx --pt2 --aoti is required"),
        (["{spec}", "--onnx", "a", "--pt2", "b.pt2"], 2, "--pt2: not allowed with argument --onnx"),
        (["{spec}", "--onnx", "a", "--step", "--chunk"], 2, "--chunk: not allowed with argument --step"),
        (["{spec}", "--onnx", "a", "--length", "many"], 2, "--length takes a positive whole number or dynamic"),
        (["{spec}", "--onnx", "a", "--batch", "0"], 2, "--batch takes a positive whole number or dynamic"),
        (["{spec}", "--onnx", ""], 2, "--onnx has no value"),
        (["{spec}", "--onnx", "{folder}"], 2, "is a folder, not a file"),
        (["{spec}", "--onnx", "-"], 2, "writes a file, not standard output"),
        (["{spec}", "--pt2", "a"], 2, "the file's name must end in .pt2"),
        (["{spec}", "--onnx", "{folder}/no/a"], 2, "there is no folder"),
        (["{spec}", "--onnx", "a", "--context"], 2, "m has no graph `context`: its only input is the one that streams"),
        (["{spec}", "--onnx", "a", "--weights", "{folder}/no"], 2, "no"),
        (["{spec}", "--onnx", "a", "--weights", "{folder}/other"], 2, "do not fit m: size mismatch for linear"),
        (["{spec}", "--onnx", "a", "--weights", "{folder}/small"], 2, "in 8 bits, which fit no other spec: export the"),
        (["vil_digits", "--onnx", "a", "--step"], 2, "cannot stream: it reads a whole image. Export its graph"),
        (["{folder}/no.yaml", "--onnx", "a"], 2, "E803"),
        (["{folder}/bad.yaml", "--onnx", "a"], 1, "E301"),
    ],
)
def test_faults(
    words: list[str], status: int, message: str, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(SPEC.replace("linear", "linaer"))
    if "other" in "".join(words):
        seqblocks.save(seqblocks.build(spec, set={"width": 5}), tmp_path / "other")
    if "small" in "".join(words):
        seqblocks.save(seqblocks.quantize(seqblocks.build(spec), smallest=0), tmp_path / "small")
    before = {*tmp_path.iterdir()}
    assert main(["export", *(word.format(spec=spec, folder=tmp_path) for word in words)]) == status
    assert message in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == before


def test_a_missing_package(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(spec), "--onnx", str(tmp_path / "m.onnx")]) == 4
    assert "onnxscript is missing. ONNX needs an extra: pip install 'seqblocks[onnx]'" in capsys.readouterr().err
