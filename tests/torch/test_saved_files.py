"""Files that `save` writes, whatever happens meanwhile, and what `restore` and `load_official` do with damaged ones."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks.checkpoint import load_official, record, restore, save, writing
from seqblocks.checkpoint.weights import unusable

TEXT = """
seqblocks: 1
let: {dim: 4}
model:
  input: {features: dim}
  steps: [linear: {features: 6, name: up}, silu, linear: {features: dim, bias: false, name: down}]
"""
ENDINGS = [".pt", ".safetensors"]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="child processes are forked")


@pytest.fixture(params=ENDINGS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == ".safetensors":
        pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")
    return tmp_path / f"m{request.param}"


def model(seed: int = 0) -> Any:
    return seqblocks.build_text(TEXT, seed=seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


# --- writing --------------------------------------------------------------------------------------------------------


def test_save_follows_links(path: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    real = tmp_path / "else" / f"real{path.suffix}"
    path.symlink_to(Path("else") / real.name)  # leads nowhere as yet
    for seed in (1, 2):
        save(model(seed), path)
        assert path.is_symlink()
        assert same(restore(real), model(seed))
        assert [each.name for each in real.parent.iterdir()] == [real.name]
    ring = tmp_path / "ring.pt"
    ring.symlink_to(tmp_path / "gnir.pt")
    (tmp_path / "gnir.pt").symlink_to(ring)
    with pytest.raises(seqblocks.UsageError, match="a link in a ring of links, and save writes regular files"):
        save(model(), ring)


def test_save_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe, plug = tmp_path / "pipe.pt", tmp_path / "s.pt"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(plug))
        device = tmp_path / "null.pt"
        device.symlink_to("/dev/null")
        kinds = {pipe: "a pipe", plug: "a socket", device: "a device", Path("/dev/null"): "a device"}
        for target, kind in kinds.items():
            with pytest.raises(seqblocks.UsageError, match=f"is {kind}, and save writes regular files"):
                save(model(), target)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["null.pt", "pipe.pt", "s.pt"]
    for target in (pipe, device, tmp_path):
        with pytest.raises(seqblocks.UsageError, match="is not a regular file"):
            restore(target)
    for odd in ("a\0b.pt", 3):
        for call in (lambda odd=odd: save(model(), odd), lambda odd=odd: restore(odd)):
            with pytest.raises(seqblocks.UsageError):
                call()


def test_the_mode_is_the_umask_s_or_the_old_file_s(path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(model(), path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        for mode in (0o600, 0o664, 0o444):
            path.chmod(mode)
            save(model(1), path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["n" * 251 + ".pt", "ä" * 126 + ".pt"])
def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path, name: str) -> None:
    save(model(), tmp_path / name)
    assert same(restore(tmp_path / name), model())
    with pytest.raises(seqblocks.UsageError, match="name too long"):
        save(model(), tmp_path / f"x{'n' * 255}.pt")


def child(work: Callable[[], Any]) -> int:
    """Run in a process of its own; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, of which this uses none
        number = os.fork()
    if number == 0:
        try:
            work()
        finally:
            os._exit(0)
    return number


@needs_fork
def test_leftovers_of_killed_saves_go_and_running_saves_stay(path: Path, tmp_path: Path) -> None:
    others = [tmp_path / f".{name}.0123abcd.saving" for name in ("other.pt", f"{path.name}.x", path.name + "x")]
    for other in others:
        other.write_bytes(b"of another target")
    release, ready = os.pipe(), os.pipe()

    def slow() -> None:
        def hang(file: Any) -> None:
            file.write(b"half")
            os.write(ready[1], b"!")
            os.read(release[0], 1)

        writing.write(path, hang)

    def unfinished() -> list[Path]:
        return sorted(each for each in tmp_path.iterdir() if each.name.endswith(".saving") and each not in others)

    running = child(slow)
    os.read(ready[0], 1)
    (first,) = unfinished()
    save(model(1), path)
    assert unfinished() == [first], "its writer is alive"
    os.kill(running, signal.SIGKILL)
    os.waitpid(running, 0)
    assert unfinished() == [first]
    save(model(2), path)
    assert unfinished() == []
    assert all(other.read_bytes() == b"of another target" for other in others)
    assert same(restore(path), model(2))
    for end in (*release, *ready):
        os.close(end)


def test_where_there_are_no_locks_age_decides(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_lock", lambda handle: None)
    old, fresh = (tmp_path / f".{path.name}.0000000{i}.saving" for i in range(2))
    for each in (old, fresh):
        each.write_bytes(b"half")
    os.utime(old, (time.time() - writing.STALE - 60,) * 2)
    save(model(), path)
    assert not old.exists()
    assert fresh.exists()


class _StopAt:
    """A file whose writer is stopped after so many bytes."""

    def __init__(self, file: Any, count: int, stop: Callable[[], None]) -> None:
        self.file, self.left, self.stop = file, count, stop

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) > self.left:
            self.file.write(view[: self.left])
            self.stop()
        self.left -= len(view)
        return int(self.file.write(view))

    def flush(self) -> None:
        pass


def full() -> None:
    raise OSError(28, "No space left on device")


def stop_writing(monkeypatch: pytest.MonkeyPatch, count: int, stop: Callable[[], None]) -> None:
    write = writing.write

    def stopped(target: Path, work: Any) -> None:
        def injected(file: Any) -> None:
            try:
                work(_StopAt(file, count, stop))
            except RuntimeError as error:  # torch's writer hides what happened
                raise OSError(28, "No space left on device") from error

        write(target, injected)

    monkeypatch.setattr(writing, "write", stopped)


@needs_fork
@pytest.mark.parametrize("part", range(12))
def test_killed_at_any_byte_the_old_file_stays(path: Path, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(1), path)
    before, inode = path.read_bytes(), path.stat().st_ino
    count = len(before) * part // 11 - (part == 11)
    with monkeypatch.context() as patch:
        stop_writing(patch, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
        killed = child(lambda: save(model(2), path))
        assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == before
    assert path.stat().st_ino == inode
    with monkeypatch.context() as patch:
        stop_writing(patch, count, full)
        with pytest.raises(OSError, match="No space left"):
            save(model(2), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path], "neither keeps its half"
    save(model(2), path)
    assert same(restore(path), model(2))


@needs_fork
def test_killed_at_any_moment_one_of_both_models_is_there(path: Path) -> None:
    models = [model(seed) for seed in range(2)]
    chance = random.Random(5)
    save(models[0], path)

    def forever() -> None:
        while True:
            for each in models:
                save(each, path)

    for _ in range(20):
        number = child(forever)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        found = restore(path)
        assert any(same(found, each) for each in models)
    save(models[1], path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
def test_a_system_call_that_fails_loses_nothing(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(1), path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="Input/output error"):
            save(model(2), path)
    assert same(restore(path), model(1))
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_raises_the_error_of_the_system(tmp_path: Path) -> None:
    """torch's writer turns it into an error about its own format."""
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "m.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(model(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


# --- reading --------------------------------------------------------------------------------------------------------


def contents(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the tensors that `save` writes."""
    made = model(seed)
    source = made.spec.source
    about = {"format": record.FORMAT, "name": source.name, "text": source.text, "overrides": {}, "files": {}}
    return about, dict(made.state_dict())


def sealed(about: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """With checksums, as far as there can be any."""
    sums = {}
    for name, tensor in tensors.items():
        plain = isinstance(tensor, Tensor) and not unusable(tensor) and tensor.is_contiguous()
        sums[name] = record.checksum(name, tensor) if plain else 0
    about = {**about, "checksums": sums}
    return {**about, "checksum": record.record_checksum(about)}


def write(path: Path, about: Any, tensors: Any) -> None:
    if path.suffix == ".pt":
        torch.save({"seqblocks": about, "tensors": tensors}, path)
    else:
        from safetensors.torch import save_file

        save_file(tensors, path, {"seqblocks": json.dumps(about)})


def test_what_the_tests_write_is_what_save_writes(path: Path) -> None:
    about, tensors = contents()
    write(path, sealed(about, tensors), tensors)
    assert same(restore(path), model())


RECORDS: list[tuple[str, Any]] = [
    *((key, value) for key in ("format", "name", "text", "overrides", "files") for value in (None, [], 3.5, ["x"])),
    ("format", True), ("text", 3), ("text", "seqblocks: 1"), ("text", "{"), ("text", ""), ("overrides", {"dim": 3}),
    ("overrides", {"dim": "{"}), ("overrides", {"nothing": "3"}), ("files", {"a": 3}),
    ("format", 0), ("format", 99), ("checksums", None), ("checksums", {"up.weight": "x"}), ("checksum", None),
    ("checksum", "0"), ("checksums", {}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), RECORDS)
def test_a_record_that_is_not_sound_is_one_clear_error(path: Path, key: str, value: Any) -> None:
    about, tensors = contents()
    about = {**sealed({**about, key: value} if key not in ("checksum", "checksums") else about, tensors)}
    if key in ("checksum", "checksums"):
        about[key] = value
    for changed in (about, {k: v for k, v in about.items() if k != key}):
        write(path, changed, tensors)
        with pytest.raises(seqblocks.SeqblocksError) as caught:
            restore(path)
        assert isinstance(caught.value, seqblocks.UsageError | seqblocks.SpecError)
        if key == "format" and type(value) is int and changed is about:
            assert "another version of seqblocks" in str(caught.value)


@pytest.mark.parametrize("data", [None, [], {}, {"seqblocks": []}, {"tensors": {}}, {"seqblocks": {}, "tensors": {}}])
def test_a_file_of_something_else_is_one_clear_error(tmp_path: Path, data: Any) -> None:
    torch.save(data, tmp_path / "m.pt")
    with pytest.raises(seqblocks.UsageError, match=r"m\.pt was not written by seqblocks\.checkpoint\.save"):
        restore(tmp_path / "m.pt")


@pytest.mark.filterwarnings("ignore")  # torch warns of what is sparse, quantised or nested
def odd_tensors() -> dict[str, Any]:
    ones = torch.ones(6, 4)
    quantised: Any = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    return {
        "integer": ones.long(), "bool": ones.bool(), "fp8": ones.to(torch.float8_e4m3fn), "complex": ones.cfloat(),
        "uint16": ones.to(torch.uint16), "sparse": ones.to_sparse(), "rows": ones.to_sparse_csr(),
        "quantised": quantised, "meta": ones.to("meta"), "expanded": torch.ones(1).expand(6, 4),
        "transposed": torch.ones(4, 6).T, "list": [1.0], "none": None, "text": "1.0", "mapping": {},
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }  # fmt: skip


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ODD = odd_tensors()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_of_another_kind_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    about, tensors = contents()
    tensors["up.weight"] = ODD[kind]
    write(tmp_path / "m.pt", sealed(about, tensors), tensors)
    with pytest.raises(seqblocks.UsageError, match=r"m\.pt was not written by seqblocks\.checkpoint\.save"):
        restore(tmp_path / "m.pt")


@pytest.mark.parametrize("kind", ["integer", "bool", "fp8", "complex", "uint16"])
def test_and_in_safetensors_too(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")
    about, tensors = contents()
    tensors["up.weight"] = ODD[kind]
    try:
        write(tmp_path / "m.safetensors", sealed(about, tensors), tensors)
    except Exception as error:  # what it cannot write, it cannot read
        pytest.skip(f"safetensors does not write it: {error}")
    with pytest.raises(seqblocks.UsageError, match=r"not written by .*: up\.weight is (of|complex)"):
        restore(tmp_path / "m.safetensors")


def outcome(path: Path) -> str:
    """What restore makes of a file: the same model, or the kind of error."""
    try:
        found = restore(path)
    except (seqblocks.UsageError, seqblocks.RunError) as error:
        return type(error).__name__
    assert same(found, model()), "changed weights that were not noticed"
    return "same"


def test_a_truncated_file_is_one_clear_error(path: Path) -> None:
    save(model(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        assert outcome(path) == "UsageError", length


def test_flipped_bits_are_noticed_or_harmless(path: Path) -> None:
    save(model(), path)
    whole, chance = path.read_bytes(), random.Random(11)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        outcome(path)


def test_every_byte_of_the_weights_is_covered(path: Path) -> None:
    save(model(), path)
    whole = path.read_bytes()
    for name, tensor in model().state_dict().items():
        start = whole.index(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
        for at in range(start, start + tensor.nbytes, 5):
            data = bytearray(whole)
            data[at] ^= 1 << (at % 8)
            path.write_bytes(data)
            with pytest.raises(seqblocks.UsageError, match=f"has changed since .*: the checksum of {name} differs"):
                restore(path)


def huge(size: int) -> str:
    return f"seqblocks: 1\nmodel: {{input: {{features: {size}}}, steps: [linear: {{features: {size}, bias: false}}]}}"


def test_a_file_that_names_a_huge_model_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqblocks.runtime.model import SequenceModel

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(SequenceModel, "to_empty", fail)
    about, _ = contents()
    tensors = {"linear.weight": torch.ones(3, 3)}
    write(path, sealed({**about, "text": huge(10**6)}, tensors), tensors)
    with pytest.raises(seqblocks.RunError, match=r"linear\.weight is \[3, 3\], and \[1000000, 1000000\] here"):
        restore(path)
    if path.suffix == ".pt":  # shapes that fit, of numbers that are not there
        tensors = {"linear.weight": torch.ones(1).expand(10**6, 10**6)}
        write(path, sealed({**about, "text": huge(10**6)}, tensors), tensors)
        with pytest.raises(seqblocks.UsageError, match=r"linear\.weight is not laid out as save writes it"):
            restore(path)
        shared = torch.ones(100, 100)
        tensors = {f"w{i}": shared for i in range(100)}
        write(path, sealed(about, tensors), tensors)
        with pytest.raises(seqblocks.UsageError, match="its tensors are larger than the file"):
            restore(path)


def test_a_compressed_file_is_refused_before_it_grows(tmp_path: Path) -> None:
    save(model(), tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as old:
        parts = {each.filename: old.read(each) for each in old.infolist()}
    with zipfile.ZipFile(tmp_path / "n.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name, part in parts.items():
            new.writestr(name, part)
    with pytest.raises(seqblocks.UsageError, match=r"n\.pt was not written by .*: its contents are compressed"):
        restore(tmp_path / "n.pt")


# --- official weights -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind not in ("expanded", "transposed")])
@pytest.mark.parametrize("name", ["up.weight", "down.weight"])
def test_official_weights_of_another_kind_change_nothing(kind: str, name: str) -> None:
    made, others = model(), dict(model(1).state_dict())
    odd = ODD[kind]
    if name == "down.weight" and isinstance(odd, Tensor) and not odd.is_nested and odd.layout != torch.sparse_csr:
        odd = odd.t()  # which fits
    with pytest.raises(seqblocks.RunError):
        load_official(made, {**others, name: odd})
    assert same(made, model())
    load_official(made, others)
    assert same(made, model(1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integer", r"up\.weight of the official weights is of torch\.int64, and weights are float64, float32"),
        ("bool", r"is of torch\.bool, and weights"),
        ("fp8", r"is of torch\.float8_e4m3fn, and weights"),
        ("sparse", r"is sparse \(torch\.sparse_coo\): to_dense\(\) it first"),
        ("quantised", r"is quantised \(torch\.qint8\): dequantize\(\) it first"),
        ("nested", r"is nested: pad it"),
        ("none", r"is not a tensor, but NoneType"),
    ],
)
def test_official_weights_of_another_kind_are_named(kind: str, message: str) -> None:
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model(), {**model().state_dict(), "up.weight": ODD[kind]})


def test_weights_that_a_dtype_does_not_hold_are_an_error(tmp_path: Path) -> None:
    made = model()
    large = {**model(1).state_dict(), "up.weight": torch.full((6, 4), 1e300, dtype=torch.float64)}
    with pytest.raises(seqblocks.RunError, match=r"up\.weight hold numbers that float32 does not hold"):
        load_official(made, large)
    assert torch.equal(made.down.weight, model().down.weight)
    with torch.no_grad():
        made.up.weight.fill_(1e5)
    save(made, tmp_path / "a.pt")
    with pytest.raises(seqblocks.RunError, match="float16 does not hold"):
        restore(tmp_path / "a.pt", dtype="float16")
    with torch.no_grad():
        made.up.weight.fill_(torch.inf)
    load_official(model(1).half(), made.state_dict())  # infinite before


def test_weights_without_storage_are_an_error() -> None:
    gone = torch.ones(6, 4)
    gone.untyped_storage().resize_(0)  # as sharding leaves what is elsewhere
    with pytest.raises(seqblocks.RunError, match=r"up\.weight of the official weights has lost its storage"):
        load_official(model(), {**model().state_dict(), "up.weight": gone})
    made = model()
    made.up.weight.untyped_storage().resize_(0)
    with pytest.raises(seqblocks.RunError, match=r"up\.weight has lost its storage"):
        load_official(made, model(1).state_dict())


def test_a_model_that_cannot_be_written_is_not_half_filled() -> None:
    made = model()
    made.down.weight = nn.Parameter(torch.ones(1).expand(4, 6))
    with pytest.raises(seqblocks.RunError, match=r"down\.weight repeats one number in memory"):
        load_official(made, model(1).state_dict())
    assert torch.equal(made.up.weight, model().up.weight)
    made = model()
    with torch.inference_mode():
        made.down.weight = nn.Parameter(torch.ones(4, 6), requires_grad=False)
    with pytest.raises(seqblocks.RunError, match=r"down\.weight was made in inference mode"):
        load_official(made, model(1).state_dict())
    assert torch.equal(made.up.weight, model().up.weight)


def test_integers_are_not_saved(tmp_path: Path) -> None:
    made = model()
    made.down.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(seqblocks.RunError, match=r"down\.weight is of torch\.int8, and weights are float64"):
        save(made, tmp_path / "m.pt")


def test_a_part_of_a_larger_storage_is_saved_alone(path: Path) -> None:
    made = model()
    everything = torch.zeros(100_000)
    everything[:24] = made.down.weight.detach().flatten()
    made.down.weight = nn.Parameter(everything[:24].view(4, 6))
    save(made, path)
    assert path.stat().st_size < 20_000
    assert same(restore(path), made)


def test_nan_is_tied_to_nan(tmp_path: Path) -> None:
    steps = "[embed: {features: 4}, unembed: {bias: false, tie: embed}]"
    text = f"seqblocks: 1\nmodel: {{input: {{tokens: 5}}, steps: {steps}}}"
    made = seqblocks.build_text(text, device="meta").to_empty(device="cpu")  # which parts what is tied
    table = torch.full((5, 4), float("nan"))
    with torch.no_grad():
        made.embed.weight.copy_(table)
        made.unembed.weight.copy_(table)
    save(made, tmp_path / "m.pt")
    assert restore(tmp_path / "m.pt").embed.weight.isnan().all()
