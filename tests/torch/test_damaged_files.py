"""`load` on folders that are damaged, changed, or made for harm; and the memory it takes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks import load, save
from seqblocks.checkpoint import folder, record
from seqblocks.checkpoint.record import RECORD
from tests.torch.odd import ODD
from tests.torch.saved import SHARDS, TEXT, model, same

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m"


def parts(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record and the tensors that `save` writes."""
    built = model(seed)
    tensors = dict(built.state_dict())
    sums = {name: record.checksum(name, tensor) for name, tensor in tensors.items()}
    return record.new_record(built.spec.source, sums, 54, {}), tensors


def sealed(about: dict[str, Any]) -> dict[str, Any]:
    return {**about, "checksum": record.record_checksum(about)}


def write(path: Path, about: Any, tensors: Any, text: str = TEXT) -> None:
    path.mkdir(exist_ok=True)
    safetensors.save_file(tensors, path / "model.safetensors")
    (path / RECORD).write_text(json.dumps(about))
    (path / "spec.yaml").write_text(text)


def test_the_files_of_these_tests_match_those_of_save(path: Path) -> None:
    write(path, *parts())
    assert same(load(path), model())


RECORDS: list[tuple[str, Any]] = [
    *((key, value) for key in ("format", "name", "overrides", "files", "tied") for value in (None, [], 3.5, ["x"])),
    ("format", True), ("overrides", {"dim": 3}),
    ("overrides", {"dim": "{"}), ("overrides", {"nothing": "3"}), ("files", {"a": 3}),
    ("format", 0), ("format", 99), ("checksums", None), ("checksums", {"up.weight": "x"}), ("checksum", None),
    ("checksum", "0"), ("checksums", {}), ("spec", None), ("spec", 0), ("parameters", "54"), ("seqblocks", 1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), RECORDS)
def test_an_invalid_record_is_one_clear_error(path: Path, key: str, value: Any) -> None:
    about, tensors = parts()
    changed = {**about, key: value} if key == "checksum" else sealed({**about, key: value})
    for each in (changed, {k: v for k, v in changed.items() if k != key}, {**about, key: value}):
        write(path, each, tensors)
        with pytest.raises(seqblocks.SeqblocksError) as caught:
            load(path)
        assert isinstance(caught.value, seqblocks.UsageError | seqblocks.SpecError)
        if key == "format" and type(value) is int and each is changed:
            assert "another version of seqblocks" in str(caught.value)


@pytest.mark.parametrize("text", ["seqblocks: 1", "{", "", TEXT.replace("dim: 4", "dim: 5")])
def test_a_spec_that_has_changed_is_one_clear_error(path: Path, text: str) -> None:
    about, tensors = parts()
    write(path, about, tensors, text)
    with pytest.raises(seqblocks.UsageError, match=r"the checksum of spec\.yaml differs"):
        load(path)
    write(path, sealed({**about, "spec": zlib.crc32(text.encode())}), tensors, text)
    with pytest.raises((seqblocks.SpecError, seqblocks.RunError)):
        load(path)


@pytest.mark.parametrize("data", ["", "null", "[]", "{}", '{"format": 1}', "{", "[" * 100_000, '"\\ud800"'])
def test_a_record_of_something_else_is_one_clear_error(path: Path, data: str) -> None:
    write(path, *parts())
    (path / RECORD).write_text(data)
    with pytest.raises(seqblocks.UsageError, match=r"was not written by seqblocks\.save|read: it is not valid JSON"):
        load(path)


@pytest.mark.parametrize("kind", ["integer", "bool", "fp8", "complex", "uint16"])
def test_a_tensor_of_another_kind_is_one_clear_error(path: Path, kind: str) -> None:
    about, tensors = parts()
    tensors["up.weight"] = ODD[kind]
    about["checksums"]["up.weight"] = record.checksum("up.weight", ODD[kind])
    try:
        write(path, sealed(about), tensors)
    except KeyError as error:  # an older safetensors can neither write nor read this
        pytest.skip(f"safetensors does not write {error}")
    with pytest.raises(seqblocks.UsageError, match=r"not written by .*: up\.weight is (of|complex)"):
        load(path)


def outcome(path: Path) -> str:
    """Return the result of load: the same model, or the kind of error."""
    try:
        found = load(path)
    except (seqblocks.UsageError, seqblocks.RunError) as error:
        return type(error).__name__
    assert same(found, model()), "changed weights were not detected"
    return "same"


@pytest.mark.parametrize("name", SHARDS)
def test_a_truncated_or_missing_file_is_one_clear_error(path: Path, name: str) -> None:
    save(model(), path, shard_size=96)
    whole = (path / name).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        (path / name).write_bytes(whole[:length])
        assert outcome(path) == "UsageError", length
    (path / name).unlink()
    assert outcome(path) == "UsageError"
    (path / name).mkdir()
    assert outcome(path) == "UsageError"


def test_a_missing_shard_is_named(path: Path) -> None:
    save(model(), path, shard_size=96)
    (path / SHARDS[1]).unlink()
    with pytest.raises(seqblocks.UsageError, match=r"lacks model-00002-of-00003\.safetensors, of the 3 files listed"):
        load(path)


def test_exchanged_shards_are_detected(path: Path) -> None:
    save(model(), path, shard_size=96)
    (path / SHARDS[0]).rename(path / "x")
    (path / SHARDS[2]).rename(path / SHARDS[0])
    (path / "x").rename(path / SHARDS[2])
    with pytest.raises(seqblocks.UsageError, match=r"its files: not in the listed file: up\.weight, "):
        load(path)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../x.safetensors"}},
              {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": ""}}, {"weight_map": {"a": ".."}},
              {"weight_map": {}}],
)  # fmt: skip
def test_an_invalid_index_is_one_clear_error(path: Path, index: Any) -> None:
    save(model(), path, shard_size=96)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert outcome(path) == "UsageError"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDS)
def test_flipped_bits_are_detected_or_harmless(path: Path, name: str) -> None:
    save(model(), path, shard_size=96)
    whole, chance = (path / name).read_bytes(), random.Random(11)
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(data)
        outcome(path)


def test_every_byte_of_the_weights_is_covered(path: Path) -> None:
    save(model(), path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for name, tensor in model().state_dict().items():
        start = whole.index(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
        for at in range(start, start + tensor.nbytes, 5):
            data = bytearray(whole)
            data[at] ^= 1 << (at % 8)
            file.write_bytes(data)
            with pytest.raises(seqblocks.UsageError, match=f"has changed since .*: the checksum of {name} differs"):
                load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["-up.weight"], "missing weights: up.weight"),
        (["+more"], "extra weights: more"),
        (["-up.weight", "+more"], "missing weights: up.weight; extra weights: more"),
    ],
)
def test_missing_and_extra_weights_are_named(path: Path, changed: list[str], message: str) -> None:
    about, tensors = parts()
    for name in changed:
        if name[0] == "-":
            del tensors[name[1:]]
        else:
            tensors[name[1:]] = torch.ones(1)
    write(path, about, tensors)
    with pytest.raises(seqblocks.UsageError) as caught:
        load(path)
    assert str(caught.value) == f"{path} has changed since it was written: {message}. Use an intact copy"


def huge(size: int) -> str:
    return f"seqblocks: 1\nmodel: {{input: {{features: {size}}}, steps: [linear: {{features: {size}, bias: false}}]}}"


def test_a_folder_that_names_a_huge_model_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqblocks.model.sequence_model import SequenceModel

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(SequenceModel, "to_empty", fail)
    tensors, text = {"linear.weight": torch.ones(3, 3)}, huge(10**6)
    sums = {name: record.checksum(name, tensor) for name, tensor in tensors.items()}
    about, _ = parts()
    about |= {"checksums": sums, "spec": zlib.crc32(text.encode())}
    write(path, sealed(about), tensors, text)
    with pytest.raises(seqblocks.RunError, match=r"linear\.weight is \[3, 3\], but \[1000000, 1000000\] in the"):
        load(path)


def test_only_one_tensor_is_read_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a tensor is read, only the previously read one is still alive."""
    save(model(), path)
    alive: list[Any] = []
    read = folder._read_tensor

    def counted(*args: Any) -> Tensor:
        import weakref

        assert not [each for each in alive if each() is not None]
        tensor = read(*args)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(folder, "_read_tensor", counted)
    load(path)
    assert len(alive) == 3


MEASURED = """
import seqblocks, safetensors.torch, sys
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
seqblocks.build_text("{model: {input: {features: 4}, steps: [linear: {features: 4}]}, seqblocks: 1}")
seqblocks.load, seqblocks.kernels
before = peak()
model = seqblocks.load(sys.argv[1])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of memory is read from /proc")
def test_memory_holds_the_model_and_one_tensor(path: Path, root: Path) -> None:
    """128 MiB in tensors of 8 MiB, plus some memory for the interpreter and the analysis."""
    steps = [f"linear: {{features: {2048 if at % 2 == 0 else 1024}, bias: false, name: l{at}}}" for at in range(16)]
    text = f"seqblocks: 1\nmodel: {{input: {{features: 1024}}, steps: [{', '.join(steps)}]}}"
    save(seqblocks.build_text(text), path, shard_size="40MB")
    env = {**os.environ, "PYTHONPATH": str(root)}
    printed = subprocess.run([sys.executable, "-c", MEASURED, path], env=env, check=True, stdout=subprocess.PIPE)
    assert 128 * 2**20 <= int(printed.stdout) < (128 + 8 + 48) * 2**20
