"""Folders written by `save`, also while other things happen. test_damaged_files.py reads damaged ones."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import load, save
from seqblocks.checkpoint import folder, load_extra, writing
from seqblocks.checkpoint.record import RECORD
from seqblocks.cli.main import main
from tests.torch.saved import SHARDS, TEXT, WHOLE, contents, model, names, same

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")

HUGE = f"{'9' * 5000}GB"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m"


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


@pytest.mark.parametrize("size", [0, -1, "5 gigabytes", "GB", True, None, "0.1", f"{HUGE}x"])
def test_invalid_sizes(path: Path, size: Any) -> None:
    with pytest.raises(seqblocks.UsageError, match="the shard size must be a number of bytes, such as"):
        save(model(), path, shard_size=size)
    assert not path.exists()


def test_a_size_may_have_any_number_of_digits(path: Path) -> None:
    for size in (10**5000, HUGE):
        save(model(), path, shard_size=size)
    with pytest.raises(seqblocks.UsageError) as caught:
        save(model(), path, shard_size=f"{HUGE}x")
    assert len(str(caught.value)) < 200
    with pytest.raises(seqblocks.UsageError, match="the shard size must be a number of bytes"):
        save(model(), path, shard_size=-(10**5000))


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


OTHERS = {"optimizer.pt": "state", "runs/events": "log"}


def put_others(path: Path) -> None:
    for name, text in OTHERS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "latest").symlink_to("runs")


def others_of(path: Path) -> dict[str, str]:
    assert (path / "latest").readlink() == Path("runs")
    return {name: (path / name).read_text() for name in OTHERS}


@pytest.mark.parametrize("links", [True, False])
def test_files_of_others_stay(path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on systems without hard links."""
    if not links:
        monkeypatch.setattr(os, "link", fail)
    put_others(path)
    numbers = [(path / name).stat().st_ino for name in ("optimizer.pt", "runs")]
    for seed in (1, 2, 3):
        save(model(seed), path, shard_size=(100 if seed == 2 else "5GB"))
        assert same(load(path), model(seed))
        assert others_of(path) == OTHERS
        own = sorted([*SHARDS, "config.json"] if seed == 2 else WHOLE)
        assert names(path) == sorted([*own, *{name.split("/")[0] for name in OTHERS}, "latest"])
        assert names(path.parent) == ["m"]
        assert [(path / name).stat().st_ino for name in ("optimizer.pt", "runs")] == numbers, "moved, not copied"
    monkeypatch.chdir(path)
    with pytest.raises(seqblocks.UsageError, match=r"^\. is the working directory, which cannot be replaced"):
        save(model(), ".")
    monkeypatch.chdir(path / "runs")
    save(model(4), "..")
    assert same(load(".."), model(4))
    assert Path("events").read_text() == "log", "the working directory is still the same folder"


def test_files_of_others_are_never_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the new folder takes the place of the old one, it has them already."""
    save(model(), path)
    put_others(path)
    place, found = writing._place, []

    def placed(folder: Path, target: Path, prefix: str) -> None:
        found.extend(names(folder))
        place(folder, target, prefix)

    monkeypatch.setattr(writing, "_place", placed)
    save(model(1), path)
    files = {name for name in OTHERS if "/" not in name}
    assert files
    assert files <= {*found}


@pytest.mark.parametrize("saved", [False, True])
def test_the_working_directory_is_not_replaced(saved: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has no files of others."""
    if saved:
        save(model(), path)
    else:
        path.mkdir()
    monkeypatch.chdir(path)
    for same_folder in (".", path, "../m"):
        with pytest.raises(seqblocks.UsageError, match="is the working directory, which cannot be replaced"):
            save(model(1), same_folder)
    assert Path.cwd() == path.resolve()
    assert names(path) == (WHOLE if saved else [])


def test_models_of_others_are_not_replaced(path: Path) -> None:
    save(model(), path)
    (path / RECORD).unlink()
    message = r"was not written by save: it has no seqblocks\.json, but model\.safetensors, which would be replaced"
    with pytest.raises(seqblocks.UsageError, match=message):
        save(model(1), path)
    (path / "model.safetensors").unlink()
    save(model(1), path)  # the same spec, and a config.json of seqblocks
    for name, text in (("spec.yaml", "seqblocks: 1"), ("config.json", '{"model_type": "gla"}'), ("config.json", "[]")):
        (path / RECORD).unlink()
        (path / "model.safetensors").unlink()
        (path / name).write_text(text)
        with pytest.raises(seqblocks.UsageError, match=f"has no seqblocks.json, but {name}, which would be replaced"):
            save(model(1), path)
        (path / name).unlink()
        save(model(1), path)


def test_folders_above_are_created(tmp_path: Path) -> None:
    save(model(), tmp_path / "a" / "b" / "m")
    assert same(load(tmp_path / "a" / "b" / "m"), model())
    (tmp_path / "file").touch()
    with pytest.raises(seqblocks.UsageError, match="cannot be written: Not a directory"):
        save(model(), tmp_path / "file" / "m")


def test_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    for name in ("m.pt", "m.pth", "m.safetensors", "m.bin", "m.PT", "m.SafeTensors"):
        with pytest.raises(seqblocks.UsageError, match=rf"a folder is written, but .*{name} is the name of a fi.*/m$"):
            save(model(), tmp_path / "new" / name)
    assert names(tmp_path) == []
    (tmp_path / "m.pt").mkdir()  # an existing folder is one
    save(model(), tmp_path / "m.pt")


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(seqblocks.UsageError, match="m cannot be written: No such file"):
        save(model(), "m")


def test_extra_belongs_to_the_model(path: Path) -> None:
    each = model()
    optimizer = torch.optim.AdamW(each.parameters())
    each(torch.ones(1, 2, 4)).sum().backward()
    optimizer.step()
    save(each, path, extra={"optimizer": optimizer.state_dict(), "step": 7})
    found = load_extra(path)
    assert found is not None
    assert found["step"] == torch.load(path / "seqblocks.extra.pt")["step"] == 7
    again = torch.optim.AdamW(load(path).parameters())
    again.load_state_dict(found["optimizer"])
    pairs = zip(again.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in pairs)
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for wrong in ({"f": lambda: 3}, {"file": (x for x in [1])}, {"deep": deep}):
        with pytest.raises(seqblocks.UsageError, match="extra cannot be stored"):
            save(model(1), path, extra=wrong)
    with pytest.raises(seqblocks.UsageError, match="extra must be a mapping, such as"):
        save(model(1), path, extra=[1])
    assert same(load(path), each)
    save(model(1), path)
    assert names(path) == WHOLE, "that of another model is removed"
    assert load_extra(path) == {}
    assert load_extra(path / "none") is None


def test_extra_survives_a_kill_between_two_renames(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), path, extra={"step": 1})
    real, calls = os.rename, []

    def rename(a: Any, b: Any) -> None:
        calls.append(a)
        if len(calls) > 1:
            raise KeyboardInterrupt  # stands for a kill: nothing below may undo the first one
        real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(model(1), path, extra={"step": 2})
    assert not path.exists()
    assert same(load(path), model())
    assert load_extra(path) == {"step": 1}
    path.mkdir()  # as a trainer does before it writes its own files
    (path / "log.txt").write_text("new")
    assert same(load(path), model())
    assert load_extra(path) == {"step": 1}
    monkeypatch.undo()
    save(model(2), path)
    assert same(load(path), model(2))
    assert (path / "log.txt").read_text() == "new"
    assert names(path.parent) == ["m"]


@pytest.mark.parametrize("when", [1, 2])
def test_a_save_during_the_renames_of_another_one(path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The inner save runs before the outer one's first or second rename. The outer one ends last, and replaces it."""
    save(model(), path)
    real, calls = os.rename, []

    def rename(a: Any, b: Any) -> None:
        calls.append(a)
        if len(calls) == when:
            save(model(1), path)
            assert same(load(path), model(1))
        real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    save(model(2), path)
    assert same(load(path), model(2))
    assert names(path.parent) == ["m"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no torch file"])
def test_a_damaged_extra_is_named(path: Path, content: bytes) -> None:
    save(model(), path, extra={"step": 7})
    (path / "seqblocks.extra.pt").write_bytes(content)
    with pytest.raises(seqblocks.UsageError, match=r"seqblocks\.extra\.pt cannot be read"):
        load_extra(path)


def test_files_added_to_the_old_folder_meanwhile_are_not_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), path)
    (path / "runs").mkdir()
    (path / "step").write_text("1")
    place = writing._place

    def meanwhile(folder: Path, target: Path, prefix: str) -> None:
        (target / "runs" / "log.txt").write_text("new")
        (target / "more").write_text("new")
        (target / "next").write_text("2")
        os.replace(target / "next", target / "step")
        place(folder, target, prefix)
        (target / "runs").mkdir()
        (target / "runs" / "other.txt").write_text("newer")

    monkeypatch.setattr(writing, "_place", meanwhile)
    save(model(1), path)
    assert same(load(path), model(1))
    found = {name: (path / name).read_text() for name in ("runs/log.txt", "runs/other.txt", "more", "step")}
    assert found == {"runs/log.txt": "new", "runs/other.txt": "newer", "more": "new", "step": "2"}
    assert names(path.parent) == ["m"]


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


@needs_fork
@pytest.mark.parametrize("part", range(12))
def test_killed_at_any_byte_the_old_folder_stays(path: Path, part: int, limited_files: Any) -> None:
    """The system kills the process at that byte of a file. The record is the largest file."""
    save(model(1), path)
    before, inode = contents(path), path.stat().st_ino
    count = max(map(len, before.values())) * part // 11 - (part == 11)

    def end_at() -> None:
        with limited_files(count):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            save(model(2), path)

    assert os.waitpid(child(end_at), 0)[1] & 0x7F == signal.SIGXFSZ
    assert contents(path) == before
    assert path.stat().st_ino == inode
    save(model(2), path)
    assert same(load(path), model(2))
    assert names(path.parent) == ["m"], "partial files should be removed"


def test_a_full_disk_raises_the_error_of_the_system(path: Path, limited_files: Any) -> None:
    """The library's own error would be different."""
    for count, more in ((10, {}), (300, {}), (3000, {"extra": {"state": torch.zeros(999)}})):
        with pytest.raises(OSError, match="File too large") as caught, limited_files(count):
            save(model(), path, **more)
        assert caught.value.filename == str(path)
        assert not list(path.parent.iterdir())


def test_a_command_reports_a_full_disk(path: Path, capsys: pytest.CaptureFixture[str], limited_files: Any) -> None:
    save(model(), path)
    with limited_files(300):
        status = main(["convert", str(path), "--to", "seqblocks", "--out", str(path.with_name("n"))])
    what, hint = "cannot be written: File too large", "Free some space there, or name another folder"
    assert (status, capsys.readouterr().err) == (4, f"error: {path.with_name('n')} {what}. {hint}\n")
    assert names(path.parent) == ["m"]


@pytest.mark.slow
@needs_fork
def test_killed_at_any_moment_one_of_both_models_is_complete(path: Path) -> None:
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
    *((os, name) for name in ("mkdir", "open", "chmod", "fsync", "rename", "unlink", "rmdir", "link", "replace")),
    (folder, "_save_file"), (Path, "write_bytes"), (Path, "write_text"),
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


def fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")


def test_any_operation_that_fails_loses_nothing(path: Path) -> None:
    put_others(path)
    save(model(1), path)
    with pytest.MonkeyPatch.context() as patch:
        done = count_operations(patch, lambda at: None)
        save(model(2), path, shard_size=100)
    assert {"mkdir", "chmod", "fsync", "_save_file", "write_text", "unlink", "rmdir", "link", "rename"} <= set(done)
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
        assert others_of(path) == OTHERS
        assert names(path.parent) == ["m"], f"{done[at - 1]}: files were left"


@pytest.mark.slow
@needs_fork
def test_killed_at_any_operation_one_of_both_models_is_complete(path: Path) -> None:
    put_others(path)
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
        assert (writing.current(path) / "optimizer.pt").read_text() == "state"
        save(model(2), path)
        assert others_of(path) == OTHERS
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
