"""Drawings: what they show, where it is placed, and that nothing in a spec becomes markup."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.descriptions.summary import Row, summarise
from seqblocks.errors import UsageError
from seqblocks.language.spec_files import bundled
from seqblocks.picture.boxes import START, Box, lanes
from seqblocks.picture.drawing import Drawing
from seqblocks.picture.svg import GAP, LANE, Placed, place
from tests.compose import compose
from tests.sampled import sampled

MODELS = [name for name, path in bundled().items() if path.parent.name == "models"]
FAULTS = Path(__file__).parent.parent / "golden" / "faults"
SVG = "{http://www.w3.org/2000/svg}"


def rows(found: list[Row]) -> Iterator[Row]:
    for row in found:
        yield row
        yield from rows(row.rows)


def all_boxes(boxes: list[Box]) -> list[Box]:
    return [box for each in boxes for box in each.inside()]


@pytest.mark.parametrize("name", sampled(MODELS, ci=4))
def test_a_box_for_each_row_of_the_summary(name: str) -> None:
    """With its shape and its counts; the line of a step is that of its verb, or of its formula. No two boxes overlap.
    """
    drawing = seqblocks.draw(name)
    _, model = seqblocks.load_spec(name)
    boxes, expected = all_boxes(drawing.boxes), list(rows(summarise(model).rows))
    assert [(box.output, box.params, box.state) for box in boxes] == [(r.output, r.params, r.state) for r in expected]
    for box in boxes:
        if box.span and box.verb != "router":  # which `experts` makes
            words = (box.verb, box.path.rpartition(".")[2]) if box.verb == "calc" else (box.verb,)
            assert box.span.source.line(box.span.line)[box.span.column - 1 :].strip("{\"'").startswith(words)
    check_places(drawing.boxes)
    check_size(drawing)


def flat(placed: list[Placed]) -> Iterator[Placed]:
    for each in placed:
        yield each
        yield from flat(each.inner)


def check_places(boxes: list[Box]) -> None:
    """Assert that no two boxes overlap, that texts fit in their boxes, and that wires run beside their lists."""
    placed = place(boxes)
    top = 50.0
    for each in placed:
        each.move(100, top)
        top += each.height + GAP
    lists = [placed, *(each.inner for each in flat(placed) if each.inner)]
    for inner in lists:
        for a, b in pairwise(inner):
            assert a.y + a.height < b.y or a.x + a.width < b.x
    for each in flat(placed):
        for inside in each.inner:
            assert each.x < inside.x
            assert inside.x + inside.width < each.x + each.width + 0.01
            assert inside.y + inside.height < each.y + each.height
        for kind, text in each.lines:
            assert len(text) * (7.32 if kind == "name" else 6.1) < each.width  # 0.61 of the size of the font
        wires = lanes(each.box.boxes)
        if wires:
            assert min(inside.x for inside in each.inner) - LANE * (1 + max(lane for *_, lane, _ in wires)) > each.x
        check_lanes(each.box.boxes)
    check_lanes(boxes)


def check_lanes(boxes: list[Box]) -> None:
    """Assert that each wire that skips a box has a lane, and that those of one lane do not overlap."""
    wires = lanes(boxes)
    reads = [(read.maker, at) for at, box in enumerate(boxes) for read in box.reads if read.maker is not None]
    assert [(maker, reader) for maker, reader, _, _ in wires] == [(maker, at) for maker, at in reads if maker < at - 1]
    ends: dict[tuple[int, int], int] = {}
    for maker, reader, lane, _ in wires:
        ends[lane, maker] = max(reader, ends.get((lane, maker), 0))
    for (lane, maker), end in ends.items():
        others = (start for other, start in ends if other == lane and start > maker)
        assert all(start >= end for start in others)


def check_size(drawing: Drawing) -> None:
    """Assert that the page is small, and that no label is cut."""
    texts = sum(len(source.text.encode()) for source in drawing.sources)
    assert len(drawing.html().encode()) <= 60_000 + texts
    for each in flat(place(drawing.boxes)):  # nothing is cut
        shown = "".join(text for _, text in each.lines).replace(" ", "")
        assert shown.startswith(f"{each.box.title}{each.box.facts}".replace(" ", ""))


@pytest.mark.slow
def test_places_of_random_models() -> None:
    """100 of them; those that the composer gets wrong are drawn with their faults."""
    for seed in range(100):
        drawing = seqblocks.draw(seqblocks.analyse(compose(seed), "random"))
        check_places(drawing.boxes)
        ElementTree.fromstring(drawing.svg())


@pytest.mark.parametrize("name", ["hybrid_small", "captioner", "zamba2_small", "vil_segmenter", "jamba_small"])
@pytest.mark.parametrize("depth", [1, 2, None])
def test_svg_is_valid_and_loads_nothing(name: str, depth: int | None) -> None:
    drawing = seqblocks.draw(name, depth=depth)
    text = drawing.svg()
    root = ElementTree.fromstring(text)
    assert len(list(root.iter(f"{SVG}rect"))) == len(all_boxes(drawing.boxes))
    assert not list(root.iter(f"{SVG}script"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert text == seqblocks.draw(name, depth=depth).svg()


class Page(HTMLParser):
    """Collects tags and their attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.names: list[str | None] = []  # of the boxes among the open tags
        self.paths: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)
            self.names.append(dict(attrs).get("data-name"))
            if self.names[-1]:
                self.paths.append(".".join(filter(None, self.names)))

    def handle_endtag(self, tag: str) -> None:
        self.names.pop()
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["hybrid_small", "captioner", "jamba_small", "rwkv7_0_4b"])
def test_html_is_one_file_whose_boxes_lead_to_lines(name: str) -> None:
    drawing = seqblocks.draw(name)
    text = drawing.html()
    page = Page(text)
    found = [attributes for _, attributes in page.tags if "data-name" in attributes]
    assert page.paths == [box.path for box in all_boxes(drawing.boxes)]
    lines = {attributes["id"] for tag, attributes in page.tags if tag == "a"}
    assert {each["data-at"] for each in found if "data-at" in each} <= lines
    assert "link" not in {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if {"src", "onclick", "style"} & attributes.keys()]
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "").replace("arXiv", "")
    for _, attributes in page.tags:
        if "data-wires" in attributes:
            json.loads(attributes["data-wires"] or "")


HOSTILE = """seqblocks: 1
about: "</script><img src=x onerror=alert(1)>"
let: {kind: "<b>"}
model:
  input: {features: 8}
  steps:
    - linear: {features: 8, as: "a"}
    - linear: {features: 8, name: "</script>"}  # <img src=x onerror=alert(1)>
    - nothing_like_it: {x: "]]> & <script>"}
"""


def test_nothing_in_a_spec_becomes_markup() -> None:
    drawing = seqblocks.draw(seqblocks.analyse(HOSTILE, "<img src=x>.yaml"))
    page = Page(drawing.html())
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    root = ElementTree.fromstring(drawing.svg())
    known = ("svg", "style", "g", "title", "rect", "text", "path")
    assert {element.tag for element in root.iter()} <= {SVG + tag for tag in known}
    assert "<script>" not in drawing.mermaid()


@pytest.mark.parametrize("path", sampled(sorted(FAULTS.glob("*.yaml"))), ids=lambda path: path.stem)
def test_specs_with_faults_are_drawn_as_far_as_they_are_known(path: Path) -> None:
    """The problems are at their steps; what has no steps raises the faults themselves."""
    found = seqblocks.analyse(path.read_text("utf-8", errors="replace"), path.name, path.parent)
    if found.lowered.body is None:
        with pytest.raises((UsageError, seqblocks.SpecError)):
            seqblocks.draw(found)
        return
    drawing = seqblocks.draw(found)
    ElementTree.fromstring(drawing.svg())
    Page(drawing.html())
    drawing.mermaid()
    drawing.dot()
    check_places(drawing.boxes)


def test_problems_stand_at_their_step() -> None:
    steps = "    - silu\n    - linear: {features: -1}\n    - gelu\n"
    text = f"seqblocks: 1\nmodel:\n  input: {{features: 8}}\n  steps:\n{steps}"
    boxes = seqblocks.draw(seqblocks.analyse(text)).boxes
    assert [len(box.problems) for box in boxes] == [0, 1, 0]
    assert boxes[1].problems[0].startswith("E209: ")


def edges_of(name: str) -> set[tuple[str, str]]:
    """Return the edges between the outermost boxes of a DOT drawing, by their titles."""
    text = seqblocks.draw(name, depth=1).dot()
    titles = dict(re.findall(r'^  (n\d+) \[label="([^":\\]*)', text, re.M)) | {"input": "input"}
    return {(titles[a], titles[b]) for a, b in re.findall(r"^  (\w+) -> (\w+)", text, re.M)}


def test_edges() -> None:
    names = ["input", "embed", "layers", "norm", "unembed"]
    assert edges_of("hybrid_small") == set(pairwise(names))


def test_dot_and_mermaid_balance() -> None:
    drawing = seqblocks.draw("vil_segmenter")
    dot, mermaid = drawing.dot(), drawing.mermaid()
    assert dot.count("{") == dot.count("}")
    clusters = sum(1 for box in all_boxes(drawing.boxes) if box.boxes)
    assert dot.count("subgraph cluster_") == clusters
    assert len(re.findall(r"^ *subgraph ", mermaid, re.M)) == len(re.findall(r"^ *end$", mermaid, re.M)) == clusters
    names = re.findall(r"^ *(?:subgraph )?(n\d+)\[", mermaid, re.M)
    assert len(names) == len(set(names)) == len(all_boxes(drawing.boxes))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("dot"), reason="needs the program dot of Graphviz")
def test_graphviz_reads_dot() -> None:
    """Each drawing, also of specs with faults: one graph, without a warning."""
    texts = [seqblocks.draw(name).dot() for name in MODELS]
    for path in sorted(FAULTS.glob("*.yaml")):
        found = seqblocks.analyse(path.read_text("utf-8", errors="replace"), path.name, path.parent)
        if found.lowered.body is not None:
            texts.append(seqblocks.draw(found).dot())
    done = subprocess.run(["dot", "-Tcanon"], input="".join(texts), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall("^digraph ", done.stdout, re.M)) == len(texts) > 200


def test_wires_from_the_input_of_a_list() -> None:
    steps = "[silu, {gelu: {as: g}}, {add: {from: input, with: g}}]"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: {steps}}}\n"
    boxes = seqblocks.draw(seqblocks.analyse(text)).boxes
    assert [(maker, reader) for maker, reader, _, _ in lanes(boxes)] == [(START, 2)]


def test_a_notebook_shows_it() -> None:
    shown = seqblocks.draw("mlstm_small")._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "&lt;!doctype html&gt;" in shown


@pytest.mark.parametrize("what", [3, None, seqblocks])
def test_what_cannot_be_drawn(what: Any) -> None:
    with pytest.raises(UsageError, match="draw takes a spec or a model"):
        seqblocks.draw(what)


Run = Callable[..., Any]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_what_is_no_file_is_written_to(run_main: Run, tmp_path: Path) -> None:
    """So that --svg /dev/null does not replace the device."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run_main("draw", "mlstm_small", "--mermaid", "pipe", cwd=tmp_path).returncode == 0
        assert os.read(reader, 4) == b"---\n"
        assert (tmp_path / "pipe").is_fifo()
    finally:
        os.close(reader)


def test_a_picture_replaces_no_spec(run_main: Run, tmp_path: Path) -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [sigmoid]}\n"
    (tmp_path / "spec.yaml").write_text(text)
    for words in ("draw spec.yaml --html", "draw spec.yaml --dot", "diff spec.yaml spec.yaml --html"):
        done = run_main(*words.split(), "spec.yaml", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "spec.yaml has something else: name another file" in done.stderr
        assert (tmp_path / "spec.yaml").read_text() == text


def test_the_command(run_main: Run, tmp_path: Path) -> None:
    done = run_main("draw", "mlstm_small", "--svg", "a.svg", "--html", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == seqblocks.draw("mlstm_small").html()
    assert (tmp_path / "a.svg").read_text("utf-8") == seqblocks.draw("mlstm_small").svg()
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: {features: 0}}]}\n"
    (tmp_path / "bad.yaml").write_text(text)
    done = run_main("draw", "bad.yaml", "--dot", "b.dot", cwd=tmp_path)
    assert done.returncode == 1
    assert "error[E209]" in done.stderr
    assert "E209" in (tmp_path / "b.dot").read_text("utf-8")
    wrong = {(): "say what to write", ("--svg", "no/a.svg"): "cannot be written"}
    wrong |= {("--svg", "-", "--dot", "-"): "only one"}
    for words, message in wrong.items():
        failed = run_main("draw", "mlstm_small", *words, cwd=tmp_path)
        assert failed.returncode == 2
        assert message in failed.stderr


def test_boxes_refer_to_lines_of_the_file_with_the_model(tmp_path: Path) -> None:
    """Not to those of a file that it uses, which `seqblocks serve` does not show."""
    (tmp_path / "blocks.yaml").write_text("seqblocks: 1\nblocks:\n  mine:\n    steps:\n      - silu\n      - gelu\n")
    spec = tmp_path / "spec.yaml"
    steps = "[mine, {residual: [silu]}]"
    spec.write_text(f"seqblocks: 1\nuse: [./blocks.yaml]\nmodel: {{input: {{features: 4}}, steps: {steps}}}\n")
    assert re.findall(r'data-line="(\d+)"', seqblocks.draw(spec).svg()) == ["3"] * 3
    assert len(all_boxes(seqblocks.draw(spec).boxes)) == 5
