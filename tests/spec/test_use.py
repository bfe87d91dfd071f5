"""`use:`: which files it reads, and the messages about files that it rejects."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqblocks.analysis import check
from seqblocks.errors import Diagnostic, SpecError, UsageError

Run = Callable[..., Any]
SECRET = "seqblocks: 1\nTOKEN=hunter2\nblocks: {stolen: {steps: [silu]}}\n"
BLOCKS = "seqblocks: 1\nblocks: {mine: {steps: [{linear: {features: 3}}]}}\n"


def top(folder: Path, *used: str, verb: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "top.yaml"
    uses = "".join(f"  - {each}\n" for each in used)
    path.write_text(f"seqblocks: 1\nuse:\n{uses}model: {{input: {{features: 2}}, steps: [{verb}]}}\n")
    return path


def faults(path: Path, **more: object) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        check.load_spec(path, **more)  # type: ignore[arg-type]
    return caught.value.diagnostics


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Create a folder with a secret file next to `specs`, whose specs are untrusted."""
    (tmp_path / ".env").write_text(SECRET)
    (tmp_path / "secret.yaml").write_text(SECRET)
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / ".env").write_text(SECRET)
    (specs / "link.yaml").symlink_to(tmp_path / ".env")
    (specs / "far.yaml").symlink_to(tmp_path / "secret.yaml")
    (specs / "near.yaml").symlink_to(specs / ".env")
    (specs / "away").symlink_to(tmp_path)
    (specs / "folder.yaml").mkdir()
    return specs


REFUSED = {
    "/etc/passwd": "it has another extension",
    "/etc/passwd.yaml": "it is outside the allowed folders",  # the message does not reveal whether it exists
    "../.env": "it has another extension",
    "./.env": "it has another extension",
    "../secret.yaml": "it is outside the allowed folders",
    "../absent.yaml": "it is outside the allowed folders",
    "link.yaml": "it links to a file with another extension",
    "near.yaml": "it links to a file with another extension",
    "far.yaml": "it is outside the allowed folders",
    "away/secret.yaml": "it is outside the allowed folders",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_elsewhere_or_of_another_type_is_refused(world: Path, name: str) -> None:
    (fault,) = faults(top(world, name))
    assert (fault.code, fault.message) == ("E804", f"`use` may not read '{name}': {REFUSED[name]}")
    assert fault.span is not None
    assert (fault.span.line, fault.span.column) == (3, 5)


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_no_line_of_a_refused_file_is_shown(world: Path, run_cli: Run, form: str) -> None:
    done = run_cli("check", str(top(world, *REFUSED)), "--format", form)
    assert done.returncode == 1
    assert "hunter2" not in done.stdout + done.stderr
    assert "root:" not in done.stdout + done.stderr
    assert "may not read" in done.stdout + done.stderr


@pytest.mark.parametrize(("name", "message"), [("folder.yaml", "directory"), ("pipe.yaml", "not a regular file")])
def test_a_folder_or_a_pipe_is_refused(world: Path, name: str, message: str) -> None:
    os.mkfifo(world / "pipe.yaml")
    before = time.monotonic()
    (fault,) = faults(top(world, name))
    assert time.monotonic() - before < 30, "opening a pipe would wait for a writer"
    assert fault.code == "E803"
    assert message in fault.message.lower()
    assert fault.span is not None
    assert fault.span.line == 3


def test_a_device_is_refused(world: Path) -> None:
    (world / "zero.yaml").symlink_to("/dev/zero")
    (fault,) = faults(top(world, "zero.yaml"))
    assert fault.code == "E804"


def test_folders_that_are_allowed(world: Path, run_main: Run, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "mine.yaml").write_text(BLOCKS)
    for name in ("../library/mine.yaml", str(library / "mine.yaml")):
        path = top(world, name)
        assert faults(path)[0].code == "E804"
        assert check.load_spec(path, allow_use=library)[1] is not None
        assert check.load_spec(path, allow_use=[str(library)])[1] is not None
        for verb in ("check", "show", "explain"):
            assert run_main(verb, str(path), "--allow-use", str(library)).returncode == 0, verb
            assert run_main(verb, str(path)).returncode == 1, verb
    assert "--allow-use DIR" in (faults(path)[0].hint or "")
    for wrong in ("/nowhere", library / "mine.yaml", [3], 3, None):
        with pytest.raises(UsageError, match="takes folders"):
            check.load_spec(path, allow_use=wrong)  # type: ignore[arg-type]


def test_a_spec_given_as_text_uses_the_files_below_the_working_directory(
    world: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Run
) -> None:
    (world / "mine.yaml").write_text(BLOCKS)
    text = top(world, "./mine.yaml").read_text()
    monkeypatch.chdir(world)
    assert check.load_text(text)[1] is not None
    with pytest.raises(SpecError, match="may not read"):
        check.load_text(text.replace("./mine", "../secret"))
    assert check.load_text(text.replace("./mine", "specs/mine"), base=world.parent)[1] is not None
    assert run_cli("check", "-", input=text, cwd=world).returncode == 0
    assert run_cli("check", "-", input=text.replace("./mine", "../secret"), cwd=world).returncode == 1


def test_only_files_supplied_with_a_spec_are_read(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (world / "mine.yaml").write_text(BLOCKS)
    text = top(world, "./mine.yaml").read_text()
    monkeypatch.chdir(world)
    _, made = check.load_text(text, files={"mine.yaml": BLOCKS.replace("3", "5")})
    assert made is not None
    assert made.output is not None
    assert made.output.features == 5
    with pytest.raises(SpecError, match="among the files provided with the spec"):
        check.load_text(text, files={})
    absolute = text.replace("./mine.yaml", str(world / "mine.yaml"))
    with pytest.raises(SpecError, match="among the files provided with the spec"):
        check.load_text(absolute, files={})
    _, made = check.load_text(absolute)
    assert made is not None
    assert made.source is not None
    monkeypatch.chdir("/")
    assert check.load_text(absolute, files=dict(made.source.files))[1] is not None


def test_what_cannot_be_read_is_reported_where_it_is_used(world: Path) -> None:
    (world / "large.yaml").write_bytes(b"#" * (9 * 1024 * 1024))
    (world / "broken.yaml").symlink_to(world / "absent.yaml")
    (world / "ring.yaml").symlink_to(world / "ring.yaml")
    (world / "mine.yml").write_text(BLOCKS)
    found = faults(top(world, "./large.yaml", "broken.yaml", "ring.yaml", "./mine.yaml", '"a\\0b.yaml"'))
    assert [(d.code, d.span and d.span.line) for d in found] == [
        ("E104", 3), ("E803", 4), ("E803", 5), ("E306", 6), ("E803", 7),
    ]  # fmt: skip
    assert found[3].hint == "did you mean 'mine.yml'?"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read files without the permission to")
def test_a_file_without_permission_is_reported_where_it_is_used(world: Path) -> None:
    (world / "mine.yaml").write_text(BLOCKS)
    (world / "mine.yaml").chmod(0)
    (fault,) = faults(top(world, "mine.yaml"))
    assert (fault.code, fault.span and fault.span.line) == ("E803", 3)


def test_the_length_of_a_chain_of_files_is_limited(world: Path) -> None:
    for at in range(500):
        (world / f"f{at}.yaml").write_text(
            f"seqblocks: 1\nuse: [./f{at + 1}.yaml]\nblocks: {{b{at}: {{steps: [silu]}}}}\n"
        )
    (world / "f500.yaml").write_text("seqblocks: 1\nblocks: {last: {steps: [silu]}}\n")
    (fault,) = faults(top(world, "f0.yaml", verb="b0"))
    assert (fault.code, fault.message) == ("E104", "`use` is nested too deeply")
    assert fault.expected == "at most 32 levels"
    assert check.load_spec(top(world, "f480.yaml", verb="b480"))[1] is not None


def test_files_count_together(world: Path) -> None:
    """Each file is within the limits of one file, but reading all of them would take minutes."""
    bomb = "let: {a: &a [1,1,1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b], d: ["
    for at in range(40):
        (world / f"f{at}.yaml").write_text(f"seqblocks: 1\n{bomb}{', '.join(['*c'] * 100)}]}}\nblocks: {{}}\n")
    found = faults(top(world, *(f"f{at}.yaml" for at in range(40))))
    assert {d.message for d in found} == {"the used files are too large"}


@pytest.mark.skipif(os.name != "posix", reason="the working directory cannot be removed")
def test_a_text_in_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = "seqblocks: 1\nuse: [vil]\nmodel: {input: {features: 8}, steps: [silu]}\n"
    assert check.load_text(text)
    with pytest.raises(SpecError, match="cannot be read"):
        check.load_text(text.replace("vil", "./x.yaml"))
