"""Run every code block of the README, of CONTRIBUTING and of docs/.

```yaml      that begins with `seqblocks:` is a spec and must validate; others are fragments and must be valid YAML
```python    blocks run in order, one namespace a page; a first line `# file.py` also makes the block importable
```console   lines after `$ ` run, and their output must match the page (`…` matches anything)
```sh        set-up commands: run by `.ci/run` and by `test_the_first_command_of_the_readme` below
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import seqblocks
from seqblocks.analysis import check
from seqblocks.errors import Report, Source
from seqblocks.language import document
from tests.torch.test_examples import quickstart

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.S)  # by the scripts in docs/
WORD = re.compile(r"(?:`[^`]+`|\S)+")  # code is kept on one line
KNOWN = {"yaml", "python", "console", "sh", "text", "json", "toml"}


def blocks(page: Path) -> list[tuple[str, str, int]]:
    text = page.read_text(encoding="utf-8")
    return [(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_blocks_are_of_a_kind_that_is_run(page: Path) -> None:
    assert {kind for kind, _, _ in blocks(page)} <= KNOWN
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), "a block without a language"


def headings(page: Path) -> set[str]:
    """Return the headings of a page as links write them: in small letters, with hyphens, without other signs."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            name, _, heading = target.partition("#")
            place = page.parent / name if name else page
            assert place.exists(), target
            assert not heading or place.suffix != ".md" or heading in headings(place), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_prose_is_at_most_100_columns_wide(page: Path) -> None:
    """Code, tables, headings and generated parts may be wider, and so may a link or code without a place to break."""
    prose = GENERATED.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    long = [line for line in prose.splitlines() if len(line) > 100 and not line.lstrip().startswith(("|", "#"))]
    assert not [line for line in long if len(WORD.findall(line.lstrip(" -*"))) > 1]


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = [name for name in dir(seqblocks) if not name.startswith("_")]
    assert len(names) > 30
    assert not [name for name in names if f"`{name}`" not in page]


def test_places_in_the_tree_exist() -> None:
    """Files and folders named in CONTRIBUTING's tables exist."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"`((?:seqblocks|kernels|cli|specs|tests|docs)/[\w./]*)`", page)
    assert len(places) > 20
    assert not [place for place in places if not (ROOT / place).exists()]


def test_positions_in_the_walk_through() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"the line `(.+)`, in line 12 of a spec", page)
    root = document.parse(Source.of("", "\n" * 11 + " " * 6 + line), Report())
    assert isinstance(root, document.Sequence)
    (step,) = root.items
    assert isinstance(step, document.Mapping)
    arguments = step.get("mlstm")
    assert isinstance(arguments, document.Mapping)
    key, _ = arguments.entries["heads"]
    assert re.findall(r"12:\d+", page) == [f"{span.line}:{span.column}" for span in (step.span, arguments.span, key)]


@pytest.mark.parametrize("page", [p for p in PAGES if any(k == "yaml" for k, _, _ in blocks(p))], ids=ids)
def test_yaml(page: Path) -> None:
    primitives = [code for kind, code, _ in blocks(page) if kind == "python" and "@primitive(" in code]
    for kind, code, line in blocks(page):
        if kind != "yaml":
            continue
        if code.startswith("seqblocks:") and not any(f"{verb}:" in code for verb in _verbs(primitives)):
            check.load_text(code, f"{ids(page)}:{line}")
        else:
            report = Report()
            document.parse(Source.of(f"{ids(page)}:{line}", code), report)
            report.raise_if_any()


def _verbs(primitives: list[str]) -> list[str]:
    return re.findall(r'@primitive\("(\w+)"\)', "".join(primitives))


# They take a second or more.
SLOW = {"designing.md", "distributed.md", "export.md", "models.md", "training.md", "transformers.md"}


def marked(page: Path) -> Any:
    return pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ())


@pytest.mark.parametrize("page", [marked(p) for p in PAGES if any(k == "python" for k, _, _ in blocks(p))], ids=ids)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the pages build models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if page.name == "README.md":
        _write_official_weights(tmp_path / "vil_tiny_official.pt")
        _write_hub_folder(tmp_path / "mamba-130m-hf")
    space: dict[str, Any] = {}
    for kind, code, line in blocks(page):
        if kind == "yaml" and code.startswith("seqblocks:"):
            space["spec"] = code
            (tmp_path / "spec.yaml").write_text(code, encoding="utf-8")
        if kind != "python":
            continue
        named = re.match(r"# (\w+)\.py\n", code)
        module = ModuleType(named[1] if named else "page")
        if named:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        else:
            module.__dict__.update(space)
        module.__dict__["spec"] = space.get("spec")
        exec(compile(code, f"{ids(page)}:{line}", "exec"), module.__dict__)
        space.update((name, value) for name, value in vars(module).items() if not name.startswith("__"))


def _write_official_weights(path: Path) -> None:
    """Write random weights under the official names of `vil_tiny`, in place of the published file."""
    import torch

    import seqblocks
    from seqblocks.analysis.checkpoint_maps.translation import official_name

    model = seqblocks.build("vil_tiny")
    torch.save({official_name(model.spec, name): x.detach() for name, x in model.named_parameters()}, path)


def _write_hub_folder(folder: Path) -> None:
    """Write a narrow Mamba with random weights and the published vocabulary, in place of the published folder."""
    import seqblocks
    from seqblocks.checkpoint.convert import convert

    seqblocks.save(seqblocks.build("mamba_130m", set={"dim": 8, "depth": 1}), folder.with_suffix(".ours"))
    convert(folder.with_suffix(".ours"), "hub", folder)
    config = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 50280}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_the_picture_is_of_the_spec() -> None:
    drawn = seqblocks.draw("hybrid_small", depth=3).svg()
    again = "run `seqblocks draw hybrid_small --depth 3 --svg docs/hybrid.svg`"
    assert (ROOT / "docs" / "hybrid.svg").read_text(encoding="utf-8") == drawn, again


@pytest.mark.parametrize("page", [marked(p) for p in PAGES if any(k == "console" for k, _, _ in blocks(p))], ids=ids)
def test_console(page: Path, tmp_path: Path, update_golden: bool) -> None:
    for kind, code, _ in blocks(page):
        if kind == "yaml" and code.startswith("seqblocks:"):
            (tmp_path / "spec.yaml").write_text(code, encoding="utf-8")
        if kind == "python" and (named := re.match(r"# (\w+)\.py\n", code)):
            (tmp_path / f"{named[1]}.py").write_text(code, encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    for kind, code, line in blocks(page):
        if kind != "console":
            continue
        shown = "".join(command + _run(command[2:], tmp_path) for command in re.findall(r"^\$ .*\n", code, re.M))
        if update_golden:
            text = text.replace(code, shown)
        else:
            assert _matches(code, shown), f"{ids(page)}:{line} shows\n{code}\nbut the output is\n{shown}"
    if update_golden:
        page.write_text(text, encoding="utf-8")


def _run(command: str, folder: Path) -> str:
    """Return the output as a reader sees it: stdout and stderr, 100 columns wide, without colour."""
    shim = folder / "bin" / "seqblocks"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m seqblocks.cli "$@"\n')
    shim.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{shim.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=env, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return re.sub(r"[ \t]+$", "", done.stdout.decode(), flags=re.M)


def _matches(shown: str, printed: str) -> bool:
    parts = re.split(r"^(…\n)", shown, flags=re.M)
    pattern = "".join("(?:.|\n)*?" if part == "…\n" else re.escape(part) for part in parts)
    return re.fullmatch(pattern, printed) is not None


def closure(name: str) -> dict[str, metadata.Distribution]:
    """Return a package and all that it requires, as installed here."""
    found, open_names = {}, [name]
    while open_names:
        name = open_names.pop().lower().replace("_", "-")
        with contextlib.suppress(metadata.PackageNotFoundError):
            if name not in found:
                found[name] = metadata.distribution(name)
                needs = (each for each in found[name].requires or () if "extra ==" not in each)
                open_names += [re.match(r"[\w.-]+", each)[0] for each in needs]
    return found


@pytest.mark.slow
def test_the_first_command_of_the_readme(tmp_path: Path) -> None:
    """The first command works in a clean clone with Python alone.

    Its example trains for two seconds here, pip compiles no module before it is imported, and finds what seqblocks
    requires, and nothing else, as it is installed here; `.ci/run` has installed it so. Each saves 20 s.
    """
    pytest.importorskip("torch", reason="installs torch again, which needs the same registry")
    first = next(code for kind, code, _ in blocks(ROOT / "README.md") if kind == "sh").rstrip()
    assert first.endswith("quickstart.py")
    clone, given = tmp_path / "clone", tmp_path / "given"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    given.mkdir()
    required = closure("seqblocks") | closure("safetensors") | closure("numpy")
    for each in (found for name, found in required.items() if name != "seqblocks"):
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (given / top).symlink_to(each.locate_file(top))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"PIP_NO_COMPILE": "1", "PYTHONPATH": str(given)}
    done = subprocess.run(
        f"{first} 2", shell=True, cwd=clone, env=clean, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "6,088,360" in done.stdout
    quickstart(done.stdout)
    shutil.rmtree(tmp_path, ignore_errors=True)  # hundreds of megabytes


def test_the_oldest_versions_are_those_of_the_page() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    torch, triton = (re.search(rf'"{name}>=(\d+\.\d+)', text) for name in ("torch", "triton"))
    assert torch is not None
    assert triton is not None
    page = (ROOT / "docs" / "kernels" / "README.md").read_text(encoding="utf-8")
    assert f"\ntorch {torch[1]} and Triton {triton[1]}, which come together on Linux, are the oldest" in page
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \| ([\d., ]*)\| (yes|no)", page, re.M)
    assert next((version, of.strip()) for version, of, compiles in rows if compiles == "yes") == (triton[1], torch[1])


def test_pages_that_stay_short() -> None:
    """Measurements are one table for each question, and a decision is what, why and cost; neither is a diary."""
    assert len((ROOT / "docs" / "measurements.md").read_text(encoding="utf-8").splitlines()) <= 120
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in folder.glob("0*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40, page.name
        assert f"]({page.name})" in index
        assert not [line for line in lines if len(line) > 100 and "](" not in line], page.name
