"""The page without a server: what is written, and that Pyodide's results are those of this Python, to the byte."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from seqblocks.cli.main import main
from seqblocks.errors import Report, Source, UnavailableError
from seqblocks.language import document
from seqblocks.language.spec_files import bundled
from seqblocks.serve import playground
from seqblocks.serve.shown import answer
from tests.spec import hostile

FAULTS = Path(__file__).parents[1] / "golden" / "faults"
IS_TEXT = [path for path in sorted(FAULTS.glob("*.yaml")) if path.stem != "yaml_not_utf8"]
CASES = {**bundled(), **{path.name: path for path in IS_TEXT}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm fetches Pyodide, and Node runs it")
    folder = tmp_path_factory.mktemp("site")
    assert main(["serve", "mlstm_small", "--static", str(folder), "-q"]) == 0
    return folder


def answers(site: Path, requests: Iterable[str]) -> list[dict[str, str]]:
    """Return what the worker answers to requests to analyse, in Node."""
    lines = "".join(json.dumps({"name": "analyse", "given": each}) + "\n" for each in requests)
    command = ["node", str(Path(__file__).with_name("playground_in_node.mjs")), str(site)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def request(name: str) -> str:
    values = {"let.dim": 48} if name == "mlstm_small" else {}
    return json.dumps({"text": CASES[name].read_text("utf-8"), "name": CASES[name].name, "set": values})


def deep(depth: int) -> str:
    steps = "[{residual: {steps: " * depth + "[silu]" + "}}]" * depth
    return json.dumps({"text": f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: {steps}}}\n", "name": "a"})


def equal(site: Path, requests: dict[str, str]) -> None:
    """Compare answers, also to specs as deep as the language allows, and deeper: WebAssembly has a smaller stack."""
    requests = {**requests, "allowed": deep(14), "too deep": deep(40)}
    found = answers(site, requests.values())
    pairs = zip(requests.items(), found, strict=True)
    assert [name for (name, given), each in pairs if each.get("text") != answer("analyse", given)] == []
    allowed, too_deep = (json.loads(each["text"]) for each in found[-2:])
    assert allowed["ok"]
    assert not too_deep["ok"]


@pytest.mark.slow
def test_pyodide_gives_the_same_results(site: Path) -> None:
    equal(site, {name: request(name) for name in [*CASES][::24]})


@pytest.mark.long
def test_pyodide_gives_the_same_results_for_everything(site: Path) -> None:
    equal(site, {name: request(name) for name in CASES})


@pytest.mark.slow
def test_the_folder(site: Path) -> None:
    """One version of Python and its ABI; nothing of what cannot run there, and no place to fetch it from."""
    info = json.loads((site / "pyodide" / "pyodide-lock.json").read_text())
    assert info["packages"] == {}
    assert (info["info"]["abi_version"], info["info"]["python"][:4]) == ("2026_0", "3.14")
    assert f"pyemscripten_{info['info']['abi_version']}_wasm32" == playground.WASM
    names = {each.name for each in site.iterdir()}
    assert names >= {"index.html", "backend.js", "page.js", "page.css", "worker.mjs", "packages.zip", "NOTICE.txt"}
    assert (site / "packages.zip").stat().st_size < 3_000_000
    page = (site / "index.html").read_text()
    assert "Content-Security-Policy" in page
    assert "http://" not in page + (site / "worker.mjs").read_text()


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from seqblocks.serve.shown import answer
sys.stdout.buffer.write(answer("analyse", sys.argv[2]).encode())
elsewhere = [name for name, each in sys.modules.items() if name.startswith("seqblocks")
             and not each.__file__.startswith(sys.argv[1])]
sys.exit(f"not among the page's files: {elsewhere}" if elsewhere else 0)
"""


def test_the_files_of_seqblocks_suffice(tmp_path: Path) -> None:
    """A module outside the folders of the page would stop it; this Python tells so without Pyodide."""
    for name, content in playground._own():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    given = request("mlstm_small")
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path), given], capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.decode() == answer("analyse", given)


def test_both_readers_of_yaml_give_the_same_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """libyaml is not in the browser. Where the two differ in what they accept, such as tabs, nothing can be equal."""
    yaml = document.yaml
    if not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML is installed without libyaml")
    count = 0
    for path in IS_TEXT:
        found = []
        for loader in (yaml.CSafeLoader, yaml.SafeLoader):
            monkeypatch.setattr(document, "_Loader", loader)
            report, warnings = Report(), Report()
            document.parse(Source.of(path.name, path.read_text("utf-8")), report, warnings)
            found.append([each.as_data() for each in (*report.diagnostics, *warnings.diagnostics)])
        assert found[0] == found[1], path.name
        count += any(each["code"] == "E101" for each in found[0])
    assert count > 20


def test_requests_of_the_page() -> None:
    assert json.loads(answer("examples", "{}")) == [*bundled()]
    found = json.loads(answer("example", '{"name": "vil_tiny"}'))
    assert found == {"name": "vil_tiny.yaml", "text": bundled()["vil_tiny"].read_text("utf-8")}
    text = "seqblocks: 1\nuse: [mine.yaml]\nmodel: {input: {features: 8}, steps: [twice]}\n"
    files = {"mine.yaml": "seqblocks: 1\nblocks: {twice: {steps: [silu, silu]}}\n"}
    assert json.loads(answer("analyse", json.dumps({"text": text, "name": "a", "files": files})))["ok"]
    none = json.loads(answer("analyse", json.dumps({"text": text, "name": "a"})))
    assert [each["code"] for each in none["problems"]] == ["E306"]


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.skipif(os.name != "posix", reason="npm is a script of a shell here")
def test_what_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs, out = tmp_path / "programs", tmp_path / "out"
    programs.mkdir()
    system = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(programs))
    assert main(["serve", "mlstm_small", "--static", str(out)]) == 4
    assert "needs npm to fetch Pyodide" in capsys.readouterr().err
    program(programs, "npm", "echo 'npm error code E404' >&2; exit 1")
    assert main(["serve", "mlstm_small", "--static", str(out)]) == 4
    assert "npm error code E404" in capsys.readouterr().err
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{system}")
    program(programs, "npm", f"echo other > pyodide-{playground.PYODIDE}.tgz")
    with pytest.raises(UnavailableError, match="sha512"):
        playground.write(out, "a.yaml", "", {})
    assert not out.exists()
    (tmp_path / "file").write_text("")
    assert main(["serve", "mlstm_small", "--static", str(tmp_path / "file")]) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["unknown_top_keys", "unknown_step_keys", "unknown_names"])
def test_the_largest_specs_in_pyodide(site: Path, name: str) -> None:
    """It answers, which a worker that runs out of stack or memory would not."""
    given = json.dumps({"text": hostile.text_of(name), "name": "a.yaml"})
    (found,) = answers(site, [given])
    assert found.get("text") == answer("analyse", given)
