"""The pages of `serve` and `draw` in Chromium: typing, underlines, repairs, sliders, links.

They need a Chromium and playwright-core, which docs/editor.md shows how to get:
`SEQBLOCKS_CHROMIUM=… SEQBLOCKS_NODE_MODULES=… pytest -m '' tests/spec/test_browser.py -s`
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.language.spec_files import bundled
from seqblocks.serve import playground
from seqblocks.serve.server import serve

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("SEQBLOCKS_CHROMIUM") or shutil.which("chromium")
MODULES = os.environ.get("SEQBLOCKS_NODE_MODULES", "")
STORED = ROOT / "tests" / "golden" / "pictures"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: set SEQBLOCKS_CHROMIUM to its program"),
    pytest.mark.skipif(not Path(MODULES, "playwright-core").is_dir() or not NODE,
                       reason="needs Node and playwright-core: set SEQBLOCKS_NODE_MODULES to their node_modules"),
]  # fmt: skip


def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0]


def run(what: str, address: str, case: Any, folder: Path, update: bool = False) -> dict[str, Any]:
    """Run the script; return its figures."""
    (folder / "case.json").write_text(json.dumps(case))
    shots = Path(os.environ.get("SEQBLOCKS_SHOTS") or folder) / what
    shots.mkdir(exist_ok=True, parents=True)
    env = {**os.environ, "NODE_PATH": MODULES, "CHROMIUM": str(CHROMIUM), "STORED": str(STORED)}
    env |= {"UPDATE": "1" if update else ""}
    script = Path(__file__).with_name("in_chromium.mjs")
    command = [str(NODE), str(script), what, address, str(folder / "case.json"), str(shots)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    print(what, address, found, file=sys.stderr)
    return found


def case(**more: Any) -> dict[str, Any]:
    """Return the README's spec, its table as the page must show it, and a text that takes long."""
    rows = seqblocks.summarise(seqblocks.load_text(readme())[1]).to_dict()
    keys = ("output", "params", "macs", "state")
    shown = [["  " * row["depth"] + row["step"].split(".")[-1], *(cell(row[key]) for key in keys)] for row in rows]
    slow = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [" + ", ".join(["linear"] * 40_000) + "]}\n"
    small = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: 8}]}\n"
    counts = {"count": "232,544 parameters", "small_count": "72 parameters"}
    return {"text": readme(), "table": shown, "slow": slow, "small": small, **counts, **more}


def cell(value: Any) -> str:
    """Return a value as JavaScript writes it: numbers with at most three decimals."""
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "spec.yaml"
    path.write_text("seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: 8}]}\n")
    yield from serving(serve(path))


@pytest.fixture
def static(tmp_path: Path) -> Iterator[Any]:
    if shutil.which("npm") is None:
        pytest.skip("npm fetches Pyodide")
    playground.write(tmp_path / "site", "mlstm_small.yaml", bundled()["mlstm_small"].read_text(), {})
    handler = partial(Quiet, directory=str(tmp_path / "site"))
    yield from serving(ThreadingHTTPServer(("127.0.0.1", 0), handler))


def as_stored(found: dict[str, Any], update: bool) -> bool:
    """Return whether the pictures of a run look like the stored ones. They are compared without letters.

    With the same fonts, equal pages give equal pictures, and pages without the wires differ in 0.9 % of the squares or
    more. With letters of other widths, up to 1.7 % differ, or 6.6 % in a narrow page; without a box, 3.8 % to 20 %.
    """
    shares = {name: share for name, share in found.get("pictures", {}).items() if share is not None}
    fonts = STORED / "fonts.json"
    if update or not fonts.is_file():
        fonts.write_text(json.dumps(found["letters"]) + "\n")
    same = json.loads(fonts.read_text()) == found["letters"]
    print("squares that differ:", shares, "with the same fonts:", same, file=sys.stderr)
    bounds = {name: 0.005 if same else 0.1 if "narrow" in name else 0.03 for name in shares}
    return update or all(share < bounds[name] for name, share in shares.items())


def test_the_page_with_its_server(served: Any, tmp_path: Path, update_golden: bool) -> None:
    found = run("page", served.address, case(), tmp_path, update_golden)
    assert as_stored(found, update_golden)
    assert found["misspelt"][2] < 300  # milliseconds, the median of five
    assert found["longest_pause"] < 300


def test_the_page_without_a_server(static: Any, tmp_path: Path) -> None:
    found = run("page", f"http://127.0.0.1:{static.server_port}/", case(shares=True), tmp_path)
    assert found["longest_pause"] < 300


def test_the_drawings(tmp_path: Path, update_golden: bool) -> None:
    cases = []
    for name in bundled():
        try:
            drawing = seqblocks.draw(name)
        except seqblocks.SeqblocksError:
            continue  # a file of blocks
        (tmp_path / f"{name}.html").write_text(drawing.html())
        (tmp_path / f"{name}.svg").write_text(drawing.svg())
        boxes = [box for each in drawing.boxes for box in each.inside()]
        paths = [box.path for box in boxes]
        cases.append({"name": name, "boxes": len(boxes), "words": boxes[-1].title, "paths": paths})
    found = run("drawings", str(tmp_path), cases, tmp_path, update_golden)
    assert as_stored(found, update_golden)
    assert found["files"] == len(cases)
    assert found["slowest_fold"] < 100


def test_mermaid_reads_its_drawings(tmp_path: Path) -> None:
    """Mermaid's own parser, in the browser; `npm install --ignore-scripts mermaid@12` puts it into the folder."""
    script = Path(MODULES, "mermaid", "dist", "mermaid.min.js")
    if not script.is_file():
        pytest.skip("needs mermaid in SEQBLOCKS_NODE_MODULES")
    cases = {}
    for name in bundled():
        with contextlib.suppress(seqblocks.SeqblocksError):  # a file of blocks
            cases[name] = seqblocks.draw(name).mermaid()
    for path in sorted((ROOT / "tests" / "golden" / "faults").glob("*.yaml")):
        found = seqblocks.analyse(path.read_text("utf-8", errors="replace"), path.name, path.parent)
        if found.lowered.body is not None:
            cases[path.stem] = seqblocks.draw(found).mermaid()
    found = run("mermaid", str(script), cases, tmp_path)
    assert found["refused"] == {}
    assert found["read"] == len(cases) > 200
