"""Folders written by `save`, also while other things happen, and `load` on damaged ones."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks import load, save
from seqblocks.checkpoint import folder, record, writing
from seqblocks.checkpoint.record import RECORD
from tests.torch.odd import ODD

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")

TEXT = """
seqblocks: 1
let: {dim: 4}
model:
  input: {features: dim}
  steps: [linear: {features: 6, name: up}, silu, linear: {features: dim, bias: false, name: down}]
"""
WHOLE = ["config.json", "model.safetensors", RECORD, "spec.yaml"]
SHARDS = [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json", *WHOLE[2:]]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="child processes are forked")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m"


@pytest.fixture(params=["exchanged", "renamed twice"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select how a folder replaces another."""
    if request.param != "exchanged":
        monkeypatch.setattr(writing, "_exchange", lambda a, b: False)
    return str(request.param)


def model(seed: int = 0) -> Any:
    return seqblocks.build_text(TEXT, seed=seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


# --- writing --------------------------------------------------------------------------------------------------------


def test_the_folder_has_the_layout_of_the_hub(path: Path) -> None:
    save(model(), path)
    assert names(path) == WHOLE
    assert (path / "spec.yaml").read_text() == TEXT
    assert safetensors.load_file(path / "model.safetensors").keys() == model().state_dict().keys()
    with safetensors.safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    save(model(1), path, shard_size=96)
    assert names(path) == ["config.json", *SHARDS]
    assert same(load(path), model(1))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": (24 + 6 + 24) * 4}
    assert {name: index["weight_map"][name] for name in ("up.weight", "down.weight")} == {
        "up.weight": SHARDS[0], "down.weight": SHARDS[2],
    }  # fmt: skip
    about = json.loads((path / RECORD).read_text())
    assert (about["seqblocks"], about["parameters"], about["tied"]) == (seqblocks.__version__, 54, {})


@pytest.mark.parametrize(("size", "files"), [(1, 3), ("0.1KB", 3), (216, 1), ("5GB", 1), (120, 2), ("1 MB", 1)])
def test_the_size_of_shards(path: Path, size: Any, files: int) -> None:
    save(model(), path, shard_size=size)
    assert len(list(path.glob("*.safetensors"))) == files
    assert same(load(path), model())


@pytest.mark.parametrize("size", [0, -1, "5 gigabytes", "GB", True, None, "0.1"])
def test_invalid_sizes(path: Path, size: Any) -> None:
    with pytest.raises(seqblocks.UsageError, match="the shard size must be a number of bytes, such as"):
        save(model(), path, shard_size=size)
    assert not path.exists()


def test_a_missing_library_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), path)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    for call in (lambda: save(model(), path), lambda: load(path)):
        with pytest.raises(seqblocks.UnavailableError, match=r"pip install 'seqblocks\[safetensors\]'"):
            call()


def test_save_follows_links(path: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    real = tmp_path / "else" / "real"
    path.symlink_to(Path("else") / real.name)  # the target does not exist yet
    for seed in (1, 2):
        save(model(seed), path)
        assert path.is_symlink()
        assert same(load(real), model(seed))
        assert same(load(path), model(seed))
        assert names(real.parent) == [real.name]
    ring = tmp_path / "ring"
    ring.symlink_to(tmp_path / "gnir")
    (tmp_path / "gnir").symlink_to(ring)
    with pytest.raises(seqblocks.UsageError, match="a symbolic link in a cycle; save needs a folder"):
        save(model(), ring)


def test_save_refuses_files(tmp_path: Path) -> None:
    pipe, plug, file, device = (tmp_path / name for name in ("pipe", "s", "file", "null"))
    os.mkfifo(pipe)
    file.write_text("notes")
    device.symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(plug))
        for target in (pipe, plug, file, device):
            with pytest.raises(seqblocks.UsageError, match="is not a folder; save needs one"):
                save(model(), target)
            with pytest.raises(seqblocks.UsageError, match="is not a folder; load needs a folder written by save"):
                load(target)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert names(tmp_path) == ["file", "null", "pipe", "s"]
    for odd in ("a\0b", 3):
        for call in (lambda odd=odd: save(model(), odd), lambda odd=odd: load(odd)):
            with pytest.raises(seqblocks.UsageError):
                call()


def test_files_of_others_are_not_removed(path: Path) -> None:
    path.mkdir()
    save(model(), path)  # an empty folder is accepted
    (path / "notes.txt").write_text("mine")
    with pytest.raises(seqblocks.UsageError, match=r"save did not write and would remove: notes\.txt\. Save to"):
        save(model(1), path)
    assert names(path) == sorted([*WHOLE, "notes.txt"])
    assert same(load(path), model())
    (path / "notes.txt").unlink()
    (path / RECORD).unlink()  # weights written by another program
    with pytest.raises(seqblocks.UsageError, match=r"was not written by save: it has no seqblocks\.json"):
        save(model(1), path)


def test_files_added_to_the_old_folder_meanwhile_are_not_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), path)
    exchange = writing._exchange

    def meanwhile(a: Path, b: Path) -> bool:
        (b / "runs").mkdir()
        (b / "runs" / "log.txt").write_text("new")
        return exchange(a, b)

    monkeypatch.setattr(writing, "_exchange", meanwhile)
    save(model(1), path)
    assert same(load(path), model(1))
    assert [each.read_text() for each in path.parent.glob("**/log.txt")] == ["new"]


def test_the_mode_is_the_umask_s_or_the_old_one_s(path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(model(), path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
        assert {stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()} == {0o640}
        for mode in (0o700, 0o775, 0o555):
            path.chmod(mode)
            (path / RECORD).chmod(mode & 0o666)
            save(model(1), path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert {stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()} == {mode & 0o666}
            assert same(load(path), model(1))
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127])
def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path, name: str) -> None:
    save(model(), tmp_path / name)
    save(model(1), tmp_path / name)
    assert same(load(tmp_path / name), model(1))
    with pytest.raises(seqblocks.UsageError, match="name too long"):
        save(model(), tmp_path / f"{'n' * 256}")


def child(work: Callable[[], Any]) -> int:
    """Run in a separate process, and return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks next to threads, which are not used here
        number = os.fork()
    if number == 0:
        try:
            work()
        finally:
            os._exit(0)
    return number


@needs_fork
def test_leftovers_of_killed_saves_go_and_running_saves_stay(path: Path, tmp_path: Path) -> None:
    others = [tmp_path / f".{name}.0123abcd.saving" for name in ("other", "m.x", "mx")]
    for other in others:
        other.mkdir()
        (other / "spec.yaml").write_bytes(b"of another target")
    release, ready = os.pipe(), os.pipe()

    def slow() -> None:
        def hang(folder: Path) -> None:
            (folder / "spec.yaml").write_bytes(b"half")
            os.write(ready[1], b"!")
            os.read(release[0], 1)

        writing.write(path, hang)

    def unfinished() -> list[Path]:
        return sorted(each for each in tmp_path.iterdir() if each.name.endswith(".saving") and each not in others)

    running = child(slow)
    os.read(ready[0], 1)
    (first,) = unfinished()
    save(model(1), path)
    assert unfinished() == [first], "its writer is still running"
    os.kill(running, signal.SIGKILL)
    os.waitpid(running, 0)
    assert unfinished() == [first]
    save(model(2), path)
    assert unfinished() == []
    assert all(names(other) == ["spec.yaml"] for other in others)
    assert same(load(path), model(2))
    for end in (*release, *ready):
        os.close(end)


def test_without_locks_age_decides(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_lock", lambda handle: None)
    old, fresh = (tmp_path / f".{path.name}.0000000{i}.saving" for i in range(2))
    for each in (old, fresh):
        each.mkdir()
    os.utime(old, (time.time() - writing.STALE - 60,) * 2)
    save(model(), path)
    assert not old.exists()
    assert fresh.exists()


def limited(count: int, action: Any) -> Any:
    """Prevent this process from growing a file above that many bytes. Return the previous limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    return before


@needs_fork
@pytest.mark.parametrize("part", range(12))
def test_killed_at_any_byte_the_old_folder_stays(path: Path, part: int) -> None:
    """The system kills the process at that byte of a file. The record is the largest file."""
    save(model(1), path)
    before, inode = contents(path), path.stat().st_ino
    count = max(map(len, before.values())) * part // 11 - (part == 11)

    def end_at() -> None:
        limited(count, signal.SIG_DFL)
        save(model(2), path)

    assert os.waitpid(child(end_at), 0)[1] & 0x7F == signal.SIGXFSZ
    assert contents(path) == before
    assert path.stat().st_ino == inode
    save(model(2), path)
    assert same(load(path), model(2))
    assert names(path.parent) == ["m"], "partial files should be removed"


def test_a_full_disk_raises_the_error_of_the_system(path: Path) -> None:
    """The library's own error would be different."""
    resource = pytest.importorskip("resource")
    handler = signal.getsignal(signal.SIGXFSZ)
    for count in (10, 300):
        before = limited(count, signal.SIG_IGN)
        try:
            with pytest.raises(OSError, match="File too large"):
                save(model(), path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert not list(path.parent.iterdir())


@needs_fork
def test_killed_at_any_moment_one_of_both_models_is_complete(path: Path, way: str) -> None:
    models = [model(seed) for seed in range(2)]
    chance = random.Random(5)
    save(models[0], path)

    def forever() -> None:
        while True:
            for each in models:
                save(each, path, shard_size=chance.choice((100, 1000)))

    for _ in range(20):
        number = child(forever)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        found = load(path)
        assert any(same(found, each) for each in models)
    save(models[1], path)
    assert names(path.parent) == ["m"]


OPERATIONS = [
    *((os, name) for name in ("mkdir", "open", "chmod", "fsync", "rename", "unlink", "rmdir")),
    (writing, "_exchange"), (folder, "_save_file"), (Path, "write_bytes"), (Path, "write_text"),
]  # fmt: skip


def count_operations(patch: pytest.MonkeyPatch, stop: Callable[[int], None]) -> list[str]:
    """Call `stop` with the number of each file operation before it runs. Return the names of the operations in order.
    """
    done: list[str] = []

    def counted(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(*args: Any, **more: Any) -> Any:
            done.append(name)
            stop(len(done))
            return run(*args, **more)

        return operation

    for place, name in OPERATIONS:
        patch.setattr(place, name, counted(getattr(place, name), name))
    return done


def one_of_both(path: Path) -> int:
    """Return the seed of the model that is stored completely."""
    found = load(path)
    (seed,) = [seed for seed in (1, 2) if same(found, model(seed))]
    return seed


def fail(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def test_any_operation_that_fails_loses_nothing(path: Path, way: str) -> None:
    save(model(1), path)
    with pytest.MonkeyPatch.context() as patch:
        done = count_operations(patch, lambda at: None)
        save(model(2), path, shard_size=100)
    assert {"mkdir", "chmod", "fsync", "_save_file", "write_text", "unlink", "rmdir"} <= set(done)
    for at in range(1, len(done) + 1):
        save(model(1), path)
        with pytest.MonkeyPatch.context() as patch:
            count_operations(patch, lambda now, at=at: fail() if now == at else None)
            try:
                save(model(2), path, shard_size=100)
                saved = True
            except (OSError, seqblocks.UsageError) as error:
                assert "Input/output error" in str(error)  # noqa: PT017 - it may succeed too
                saved = False
        seed = one_of_both(path)
        assert seed == 2 or not saved, f"{done[at - 1]}: reported as saved"
        save(model(2), path)
        assert names(path.parent) == ["m"], f"{done[at - 1]}: files were left"


@needs_fork
def test_killed_at_any_operation_one_of_both_models_is_complete(path: Path, way: str) -> None:
    save(model(1), path)
    with pytest.MonkeyPatch.context() as patch:
        done = count_operations(patch, lambda at: None)
        save(model(2), path)
    for at in range(1, len(done) + 1):
        save(model(1), path)

        def work(at: int = at) -> None:
            patch = pytest.MonkeyPatch()
            count_operations(patch, lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == at else None)
            save(model(2), path)

        assert os.waitpid(child(work), 0)[1] == signal.SIGKILL
        one_of_both(path)
        save(model(2), path)
        assert one_of_both(path) == 2
        assert names(path.parent) == ["m"], f"{done[at - 1]}: files were left"


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(1), path)
    read, times = folder._read_record, []

    def replaced(*args: Any) -> Any:
        found = read(*args)
        if not times:
            times.append(1)
            save(model(2), path)
        return found

    monkeypatch.setattr(folder, "_read_record", replaced)
    assert same(load(path), model(2))


@pytest.mark.parametrize("size", ["5GB", 100])
def test_also_between_two_tensors(path: Path, size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(1), path)
    read, times = folder._read_tensor, []

    def replaced(*args: Any) -> Any:
        found = read(*args)
        if not times:
            times.append(1)
            save(model(2), path, shard_size=size)
        return found

    monkeypatch.setattr(folder, "_read_tensor", replaced)
    assert same(load(path), model(2))


def test_a_file_that_vanishes_while_it_is_read_is_one_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), path)
    read = folder._read_tensor

    def removed(*args: Any) -> Any:
        found = read(*args)
        (path / "model.safetensors").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(folder, "_read_tensor", removed)
    with pytest.raises(seqblocks.UsageError, match=r"model\.safetensors has changed while it was read"):
        load(path)


# --- reading --------------------------------------------------------------------------------------------------------


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
    with pytest.raises(seqblocks.UsageError, match=r"does not describe its files: up\.weight, .* not in the listed"):
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


def huge(size: int) -> str:
    return f"seqblocks: 1\nmodel: {{input: {{features: {size}}}, steps: [linear: {{features: {size}, bias: false}}]}}"


def test_a_folder_that_names_a_huge_model_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqblocks.runtime.model import SequenceModel

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
