"""Exported graphs compared with the model: ONNX in onnxruntime, torch programs, their contracts, and errors."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks import Op, export, primitive
from seqblocks.errors import RunError, UnavailableError, UsageError
from seqblocks.export import compare, files, program
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.op import PRIMITIVES
from seqblocks.testing import random_input

MIXERS = {  # the exporters take seconds for each
    "mamba": ["{mamba_mixer: {dim: 8, state: 4}}"],
    "mlstm": ["{mlstm_layer: {dim: 8, heads: 2}}"],
    "slstm": ["{slstm_block: {dim: 8, heads: 2}}"],
    "centaurus": ["{centaurus: {features: 8, state: 4}}"],
    "memoroid": ["{memoroid_layer: {dim: 8, heads: 2}}"],
    "retnet": ["{retention_mixer: {dim: 8, heads: 2}}"],
    "transformer": ["{attention_layer: {dim: 8, heads: 2, window: 5}}"],
}
CONTEXT = """
seqblocks: 1
use: [transformer]
model:
  inputs: {text: {features: 8}, sound: {features: 4}}
  steps:
    - linear: {from: sound, features: 8, as: heard}
    - cross_attention_layer: {from: text, dim: 8, memory: heard, heads: 2}
    - causal_conv: {kernel: 3, as: h}
    - linear: {features: 1, as: value}
    - linear: {from: h, features: 3, as: policy}
  outputs: [policy, value]
"""


class Session:
    """Run an ONNX file as a program without seqblocks does, using its metadata."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.contract = json.loads(self.session.get_modelmeta().custom_metadata_map["seqblocks"])

    def initial(self, batch: int) -> dict[str, Any]:
        """The state before the first token."""
        return {
            part["input"]: numpy.full((batch, *part["shape"][1:]), part["initial"], part["dtype"])
            for part in self.contract["state"]
            if part["initial"] is not None
        }

    def __call__(self, state: dict[str, Any] | None = None, **inputs: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Return the outputs by name, and the state in the form that the next call expects."""
        names = [each.name for each in self.session.get_outputs()]
        given = {name: x.detach().numpy() for name, x in inputs.items()} | (state or {})
        found = dict(zip(names, self.session.run(names, given), strict=True))
        following = {part["input"]: found.pop(part["output"], None) for part in self.contract["state"]}
        return {name: torch.from_numpy(x) for name, x in found.items()}, following


def recurrent(mixer: str = "") -> SequenceModel:
    """Return a language model of a minGRU, preceded by another mixer if one is named."""
    steps = ", ".join(["{embed: 8}", *MIXERS.get(mixer, ()), "{mingru_mixer: {dim: 8}}", "{linear: 5}"])
    used = {"centaurus": "", "slstm": ", xlstm", "mlstm": ", xlstm", "": ""}.get(mixer, f", {mixer}")
    text = f"seqblocks: 1\nuse: [mingru{used}]\nmodel: {{input: {{tokens: 11}}, steps: [{steps}]}}"
    return seqblocks.build_text(text).eval()


def close(found: Tensor, expected: Tensor) -> None:
    """Compare to half the digits of float32, because sums are in another order."""
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["", *(pytest.param(m, marks=pytest.mark.long) for m in MIXERS)])
def test_a_stream_continues_a_prompt_in_onnxruntime(mixer: str, tmp_path: Path) -> None:
    """A chunk of any length followed by single tokens gives the result of torch on the whole sequence."""
    model = recurrent(mixer)
    for graph in ("chunk", "step"):
        assert export.onnx(model, tmp_path / f"{graph}.onnx", graph).difference < 1e-5
    read, run = Session(tmp_path / "chunk.onnx"), Session(tmp_path / "step.onnx")
    assert run.contract["state"] == read.contract["state"]
    assert run.contract["inputs"] == [{"name": "input", "shape": ["batch"], "dtype": "int64"}]
    sizes = [each.shape for each in read.session.get_inputs()]
    assert sizes == [["batch", "seq"], *(part["shape"] for part in read.contract["state"])]
    x, state, parts = random_input(model, 2, 19), read.initial(2), []
    for start, end in ((0, 1), (1, 16)):
        y, state = read(state, input=x[:, start:end])
        parts.append(y["output"])
    for t in range(16, 19):
        y, state = run(state, input=x[:, t])
        parts.append(y["output"].unsqueeze(1))
    close(torch.cat(parts, 1), model(x))


@pytest.mark.slow
def test_a_context_initialises_the_state() -> None:
    """The graph `context` creates the initial state of the steps. Several inputs and outputs have their names."""
    model = seqblocks.build_text(CONTEXT).eval()
    (first, _), (following, contract) = (export.trace(model, graph) for graph in ("context", "step"))
    heard, memory = contract.state
    assert contract.inputs == (export.Port("text", ("batch", 8), "float32"),)
    assert contract.outputs == (
        export.Port("policy", ("batch", 3), "float32"), export.Port("value", ("batch", 1), "float32"),
    )  # fmt: skip
    assert heard.input == "state.cross_attention_layer.residual.kv.output"
    assert (heard.shape, heard.initial) == (("batch", "sound", 16), None)
    assert memory == export.Part("state.h.window", "next_state.h.window", ("batch", 2, 8), "float32", 0.0)
    begin, step = first.module(), following.module()
    assert "seqblocks" not in f"{begin.code}{step.code}"
    x, context = random_input(model, 3, 4).detach(), {"sound": torch.randn(3, 9, 4)}
    expected = model(text=x, **context)
    state = begin(context)
    for t in range(4):
        y, state = step(x[:, t], state)
        assert y.keys() == {"policy", "value"}
        close(y["policy"], expected["policy"][:, t])
        close(y["value"], expected["value"][:, t])


ALONE = """
import json, sys, torch
found = torch.export.load(sys.argv[1], extra_files=(extra := {"seqblocks.json": ""}))
x, state, y = torch.load(sys.argv[2])
torch.testing.assert_close(found.module()(x, state)[0], y)
assert json.loads(extra["seqblocks.json"])["graph"] == "chunk", extra
assert not [name for name in sys.modules if name.startswith("seqblocks")]
"""


@pytest.mark.long
def test_a_program_needs_no_seqblocks(tmp_path: Path) -> None:
    model = recurrent()
    export.pt2(model, tmp_path / "m.pt2", "chunk", batch=2, check=False)
    x, state = random_input(model, 2, 6), model.init_state(2)
    with torch.no_grad():
        torch.save((x, state, model(x, state=state, return_state=True)[0]), tmp_path / "call.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path / "m.pt2", tmp_path / "call.pt"], cwd=tmp_path, text=True,
        capture_output=True, env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_experts_and_fixed_sizes_in_onnxruntime(tmp_path: Path) -> None:
    """Each token uses its own experts, whatever else is in the batch. A fixed length and batch are constants."""
    steps = "[{experts: {count: 4, top: 2, steps: [{swiglu: 6}]}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}").train()
    export.onnx(model, tmp_path / "m.onnx", length=7, batch=2)
    assert model.training
    session = Session(tmp_path / "m.onnx")
    assert session.contract["inputs"] == [{"name": "input", "shape": [2, 7, 4], "dtype": "float32"}]
    x = random_input(model, 2, 7)
    close(session(input=x)[0]["output"], model.eval()(x))


@pytest.mark.slow
def test_an_empty_state_in_onnxruntime(tmp_path: Path) -> None:
    """A window of one token has a state without tokens."""
    model = made("{linear: {features: 4, as: x}}, {attention: {q: x, k: x, v: x, heads: 2, window: 1}}")
    export.onnx(model, tmp_path / "m.onnx", "step", check=False)
    session = Session(tmp_path / "m.onnx")
    state, before = session.initial(3), None
    for x in torch.randn(2, 3, 4).unbind():
        found, state = session(state, input=x)
        y, before = model.step(x, before)
        close(found["output"], y)


# ------------------------------------------------------------------------------------------------ faults


@pytest.fixture
def verbs() -> Iterator[None]:
    """Register primitives that no exporter supports."""
    before = dict(PRIMITIVES)

    @primitive("bessel")
    class Bessel(Op):
        """An operator that does not exist in ONNX."""

        def forward(self, p: Any, call: Any, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    @primitive("looks")
    class Looks(Op):
        """A branch that depends on values."""

        def forward(self, p: Any, call: Any, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    @primitive("five")
    class Five(Op):
        """A size written as a constant."""

        def forward(self, p: Any, call: Any, x: Tensor) -> Tensor:
            return x * torch.ones(x.shape[0], int(x.shape[1]), 1)

    yield
    PRIMITIVES.clear()
    PRIMITIVES.update(before)


def made(steps: str) -> SequenceModel:
    return seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{steps}]}}").eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("{residual: {name: inner, steps: [bessel]}}", r"inner.bessel cannot be converted to ONNX: .*bessel_j0"),
        ("{residual: {name: inner, steps: [looks]}}", r"inner.looks cannot be exported \(graph forward\): Could not"),
        ("five", r"the model cannot be exported .* a step fixes .*size\(\)\[1\].*: pass `length` or `batch`"),
    ],
)
def test_unsupported_operators_are_named(steps: str, message: str, verbs: None, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        export.onnx(made(steps), tmp_path / "m.onnx")
    assert not [*tmp_path.iterdir()]


def test_wrong_arguments(tmp_path: Path) -> None:
    file, model = tmp_path / "m.onnx", made("{linear: 3}")
    for call, kind, message in [
        (lambda: export.onnx(seqblocks.build("vil_digits"), file, "step"), RunError, "cannot stream.*graph `forward`"),
        (lambda: export.onnx(model, file, "steps"), UsageError, "there is no graph 'steps'; use forward, step"),
        (lambda: export.onnx(model, file, ["step"]), UsageError, r"there is no graph \['step'\]; use forward"),
        (lambda: export.onnx(model, file, batch=10**30), UsageError, r"at most 10\^9, or None, not 1000"),
        (lambda: export.onnx(model, file, batch=10**9, length=10**9), UnavailableError, "take 16,000,000,000 GB and"),
        (lambda: export.onnx(model, tmp_path / "\udcff.onnx"), UsageError, "its folders must be UTF-8"),
        (lambda: export.pt2(model, tmp_path / "\ud800" / "m.pt2"), UsageError, "its folders must be UTF-8"),
        (lambda: export.onnx(model, file, "context"), UsageError, "its only input is the one that streams"),
        (lambda: export.onnx(model, file, "step", length=3), UsageError, "`length` applies only to the graphs"),
        (lambda: export.onnx(model, file, batch=0), UsageError, "batch must be a whole number of at least 1"),
        (lambda: export.onnx(torch.nn.Linear(2, 2), file), UsageError, "a model from seqblocks.build, not Linear"),
        (lambda: export.onnx(model, tmp_path / "a" / "m.onnx"), UsageError, "there is no folder"),
        (lambda: export.onnx(model, tmp_path), UsageError, "is a folder, not a file"),
        (lambda: export.pt2(model, tmp_path / "m.bin"), UsageError, r"end in \.pt2.*m\.bin\.pt2"),
        (lambda: export.onnx(seqblocks.build("vil_digits", device="meta"), file), UsageError, "on the meta device"),
    ]:
        with pytest.raises(kind, match=message):
            call()
    with pytest.raises(UsageError, match="the spec fixes the length at 16000"):
        export.trace(seqblocks.build("centaurus_keywords"), length=160)
    assert not [*tmp_path.iterdir()]


def test_a_program_that_refuses_a_size_is_not_written() -> None:
    model = made("{linear: 3}")
    exported = export.trace(model)

    def refuse(x: torch.Tensor) -> None:
        raise AssertionError("Guard failed: 8 == x.size()[1]\nand more")

    with pytest.raises(RunError, match=r"torch cannot run the exported program: Guard failed: 8 == x\.size\(\)\[1\]$"):
        compare.agree(model, exported.contract, files._as_run(model, exported, refuse), "m.pt2")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as absent:
            absent.setitem(sys.modules, name, None)
            with pytest.raises(UnavailableError, match=rf"{name} is missing.*pip install 'seqblocks\[onnx\]'"):
                export.onnx(made("{linear: 3}"), tmp_path / "m.onnx", check=True)


def test_an_earlier_file_stays_where_a_new_one_fails(tmp_path: Path) -> None:
    file, model = tmp_path / "m.onnx", made("{linear: 3}")
    file.write_text("earlier")
    contract = export.trace(model).contract

    def wrong(new: Path) -> float:
        new.write_text("new")
        return compare.agree(model, contract, lambda tensors: [tensors[0][..., :3] + 1.0], str(file))

    def full(new: Path) -> None:
        new.write_text("n")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"m\.onnx and the model differ: output by .* Nothing was written"):
        files._write(file, ".onnx", wrong)
    with pytest.raises(UnavailableError, match=r"m\.onnx cannot be written: No space left"):
        files._write(file, ".onnx", full)
    assert file.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [file]


def test_only_exported_models_are_replaced(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("seqblocks: 1")
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    for path in (spec, pipe):
        with pytest.raises(UsageError, match="exists, and is probably not an exported model"):
            export.onnx(made("{linear: 3}"), path)
    assert spec.read_text() == "seqblocks: 1"


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, limited_files: Any) -> None:
    """A write that raises would end the process, because torch's writer writes again when it is deleted."""
    with pytest.raises(UnavailableError, match=r"m\.pt2 cannot be written: File too large"), limited_files(4096):
        export.pt2(made("{linear: 3}"), tmp_path / "m.pt2")
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_does_not_end_the_process_of_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited_files: Any
) -> None:
    """AOTInductor packages code with the same writer. Compiling takes a minute, so a program is packaged instead."""

    def package(program: Any, package_path: Any, inductor_configs: Any) -> None:
        with limited_files(4096):
            torch.export.save(program, package_path)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    with pytest.raises(UnavailableError, match=r"m\.pt2 cannot be written: File too large"):
        export.aoti(made("{linear: 3}"), tmp_path / "m.pt2")
    assert not [*tmp_path.iterdir()]


def test_a_lack_of_memory_is_an_error_of_the_machine() -> None:
    with pytest.raises(UnavailableError, match="needs more memory: pass a smaller batch"), program.explained_memory():
        torch.empty(1 << 60, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="must match"), program.explained_memory():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize("name", ["a" * 250, "€" * 83], ids=["ascii", "others"])
def test_a_name_may_be_as_long_as_the_system_allows(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.pt2"
    export.pt2(made("{linear: 3}"), file)
    assert [*tmp_path.iterdir()] == [file]
    assert len(os.fsencode(files._weights_of(tmp_path / f".{files._prefix(file)}.01234567.onnx").name)) < 255


@pytest.mark.slow
def test_a_new_file_has_the_mode_of_the_one_it_replaces(tmp_path: Path) -> None:
    file, model = tmp_path / "m.pt2", made("{linear: 3}")
    export.pt2(model, file)
    for mode in (0o600, 0o664):
        file.chmod(mode)
        export.pt2(model, file)
        assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.long
def test_large_weights_have_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an earlier export is removed, and no other."""
    monkeypatch.setattr(files, "MAX_BYTES_IN_FILE", 8)  # bytes
    (other := tmp_path / "m.0a1b2c3d.data").write_bytes(b"of another program")
    found = set()
    for _ in range(2):
        export.onnx(made("{linear: 100}"), tmp_path / "m.onnx", check=False)
        (weights,) = {*tmp_path.glob("*.data")} - {other}
        found.add(weights)
    assert len(found) == 2
    assert len([*tmp_path.iterdir()]) == 3
    assert Session(tmp_path / "m.onnx")(input=torch.ones(1, 2, 4))[0]["output"].shape == (1, 2, 100)


# ------------------------------------------------------------------------------------------------ by hand

JUDGED = ["mlstm_small", "mamba_small", "hybrid_small", "centaurus_mlstm", "centaurus_denoiser", "vil_digits"]


@pytest.mark.long
@pytest.mark.parametrize("graph", ["forward", "step"])
@pytest.mark.parametrize("name", JUDGED)
def test_bundled_models_in_onnxruntime(name: str, graph: str, tmp_path: Path) -> None:
    if graph == "forward" or name != "vil_digits":
        assert export.onnx(seqblocks.build(name), tmp_path / "m.onnx", graph).difference < 1e-4


@pytest.mark.long
def test_torch_still_needs_the_sizes_of_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, seqblocks/export/loops.py can go, or stay only for the versions of torch before the fix."""
    monkeypatch.setattr("seqblocks.export.files.pass_sizes", lambda program: None)
    model = seqblocks.build("mamba_small", set={"dim": 8, "depth": 1, "vocabulary": 11}, device="cpu").eval()
    with pytest.raises(RunError, match="KeyError"):
        export.aoti(model, tmp_path / "m.pt2")


@pytest.mark.long
@pytest.mark.parametrize("graph", ["forward", "step"])
def test_compiled_packages(graph: str, tmp_path: Path) -> None:
    """An AOTInductor package runs the same calls without seqblocks. Making one takes a minute."""
    model = recurrent("mlstm")
    assert export.aoti(model, tmp_path / "m.pt2", graph).difference < 1e-4
    arguments = program.example(model, export.trace(model, graph).contract)
    torch.save((arguments, program.Graph(model, graph)(*arguments)), tmp_path / "call.pt")
    code = (
        "import sys, torch; from torch._inductor import aoti_load_package; from torch.utils import _pytree as tree\n"
        "x, y = torch.load(sys.argv[2]); found = aoti_load_package(sys.argv[1])\n"
        "with torch.no_grad(): torch.testing.assert_close(tree.tree_leaves(found(*x)), tree.tree_leaves(y))\n"
        "assert not [name for name in sys.modules if name.startswith('seqblocks')]\n"
        "assert 'seqblocks' in found.get_metadata()"
    )
    command = [sys.executable, "-c", code, tmp_path / "m.pt2", tmp_path / "call.pt"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_file_that_onnxruntime_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(b"no model")
    model = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 2}, steps: [silu]}")
    with pytest.raises(RunError, match=r"cannot load .* To write the file without running it, use --no-check"):
        files._in_onnxruntime(file, program.trace(model, "forward").contract)
