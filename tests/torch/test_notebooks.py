"""What notebooks and interactive sessions show: short texts, tables, and diagnostics instead of tracebacks."""

from __future__ import annotations

import html.parser
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import seqblocks
from seqblocks.errors import SpecError

SPEC = seqblocks.load_model("hybrid_small", set={"dim": 32})
MODEL = seqblocks.build_model(SPEC)
SUMMARY = seqblocks.summarise(SPEC)
FAULTY = 'seqblocks.build_text("seqblocks: 1\\nmodel: {input: {features: 8}, steps: [{linear: {featurs: 4}}]}")'


@pytest.mark.parametrize(
    ("thing", "shown"),
    [
        (SPEC, r"<ModelSpec hybrid_small: \[batch, seq\] -> \[batch, seq, 256\], [\d,]+ parameters>"),
        (SPEC.graph, "<Graph of 4 steps: embed, layers, norm, unembed>"),
        (SPEC.graph.nodes[1], r"<repeat layers: \[batch, seq, 32\]>"),
        (SPEC.source, r"SpecSource\('hybrid_small.yaml', \d+ characters\)"),
        (SPEC.graph.nodes[0].span.source, r"Source\('hybrid_small.yaml', \d+ lines\)"),
        (SUMMARY, r"<Summary of hybrid_small: \[batch, seq\] -> \[batch, seq, 256\], [\d,]+ parameters>"),
        (SUMMARY.rows[0], r"<Row embed: embed, \[batch, seq, 32\], 8,192 parameters>"),
        (MODEL.stream(2), r"<Stream of hybrid_small: 2 sequences, [\d,]+ bytes of state on cpu>"),
        (seqblocks.build_text("{seqblocks: 1, model: {input: {features: 8}, steps: [silu]}}").stream(2),
         "<Stream of <text>: 0 bytes of state>"),
    ],
)  # fmt: skip
def test_reprs_are_one_line(thing: Any, shown: str) -> None:
    assert re.fullmatch(shown, repr(thing))
    assert repr(thing).isascii()  # any terminal can print it


def test_the_repr_of_a_model_is_that_of_torch() -> None:
    """Modules that contain the model show its modules too."""
    assert repr(MODEL) == str(MODEL) == nn.Module.__repr__(MODEL)
    assert "(embed)" in repr(nn.Sequential(MODEL))


def test_a_table_is_what_the_command_prints(run_main: Any) -> None:
    done = run_main("build", "hybrid_small", "--set", "dim=32", "--summary")
    assert done.stdout.rstrip("\n") == SUMMARY.table(width=100) == SUMMARY.table(100)
    done = run_main("build", "hybrid_small", "--set", "dim=32", "--summary", "--batch", "4", "--length", "8")
    assert done.stdout.rstrip("\n") == seqblocks.summarise(SPEC, length=8).table(100, batch=4)
    assert max(map(len, SUMMARY.table(70).splitlines()[2:-5])) <= 70


def test_print_of_a_summary_is_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert str(SUMMARY) == SUMMARY.table(90)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert str(SUMMARY).isascii()


class Cells(html.parser.HTMLParser):
    """The rows of a table, and the tags that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("thing", [SPEC, SPEC.graph, SUMMARY, MODEL])
def test_html_is_a_table(thing: Any) -> None:
    found = Cells(thing._repr_html_())
    assert found.open == []
    (title, *_), *rows = found.rows
    assert title == "step"
    assert len({len(row) for row in found.rows}) == 1
    names = [row[0] for row in rows if not row[0].startswith(" ")]
    assert names == ["embed", "layers", "norm", "unembed"]


def test_html_is_escaped() -> None:
    _, spec = seqblocks.load_text("{seqblocks: 1, model: {input: {features: 8}, steps: [silu]}}", "<b>.yaml")
    assert spec is not None
    for shown in (spec._repr_html_(), seqblocks.summarise(spec)._repr_html_()):
        assert "&lt;b&gt;" in shown
        assert shown.count("<b>") == shown.count("</b>")


def test_rows_are_dicts() -> None:
    rows = SUMMARY.to_dict()
    assert sum(row["params"] for row in rows if row["depth"] == 0) == SUMMARY.params
    assert [row["step"] for row in rows[:3]] == ["embed", "layers", "layers.0"]
    assert {row["step"]: row["verb"] for row in rows}["layers.1.mamba_block.residual.mixer.ssm"] == "ssm"
    assert len({tuple(row) for row in rows}) == 1
    pandas = pytest.importorskip("pandas", reason="pandas is not a requirement")
    assert pandas.DataFrame(rows).shape == (len(rows), len(rows[0]))


# ------------------------------------------------------------------------------
# Errors


def raised(call: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        call()
    return caught.value


def test_ipython_shows_the_diagnostic() -> None:
    error = raised(lambda: seqblocks.build_text("{seqblocks: 1, model: {input: {features: 8}, steps: [linar]}}"))
    lines = error._render_traceback_()
    assert lines[0] == "SpecError"
    assert re.fullmatch(r"----> \d+ error = raised\(lambda: .*", lines[1])
    assert lines[3:] == str(error).splitlines()
    assert pickle.loads(pickle.dumps(error))._render_traceback_() == ["SpecError", "", *lines[3:]]


def test_ipython_itself() -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not a requirement")
    from IPython.utils.capture import capture_output

    shell = shells.InteractiveShell()
    with capture_output() as out:
        shell.run_cell(f"import seqblocks\n\n{FAULTY}")
    shown = re.sub(r"\x1b\[[\d;]*m", "", out.stdout + out.stderr)
    assert "did you mean 'features'?" in shown
    assert f"----> 3 {FAULTY}" in shown
    assert "Traceback" not in shown
    assert "seqblocks/" not in shown
    with capture_output() as out:
        shell.run_cell("seqblocks.load_model('mamba_small')")
    assert "<ModelSpec mamba_small" in out.stdout


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(seqblocks.RunError) as caught:
        MODEL(torch.zeros(1, 2, 3))
    assert not hasattr(caught.value, "_render_traceback_")
