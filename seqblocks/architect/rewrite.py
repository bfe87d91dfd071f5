"""Write values into the text of a spec. Comments, layout and everything else stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqblocks.analysis.analyse import Analysis, Folders, RawText, analyse_text
from seqblocks.architect.designs import Design
from seqblocks.errors import ExpectationError, Report, Source, Span, UsageError, quote
from seqblocks.graph import ModelSpec, count
from seqblocks.language import document
from seqblocks.language.document import Mapping as Entries
from seqblocks.language.document import Scalar
from seqblocks.language.overrides import as_text, find_value

Edit = tuple[Span, str]
FIGURES = ("params", "active_params", "state_bytes", "flops_per_token")  # of `expect:`


def rewritten(design: Design, values: Mapping[str, Any], path: Path, allow_use: Folders = ()) -> tuple[str, Analysis]:
    """Return the text of a spec with the overrides of a design, and further ones, in place of the values written there.

    Numbers in `expect:` that no longer hold are replaced too. Also returns the analysis of the text as a file at
    `path`, whose status is 3 if another entry of `expect:` is not met. Raises UsageError for an override whose value is
    not written in the spec, SpecError if the text is invalid at that place.
    """
    changes = {**design.overrides, **values}
    root = document.parse(Source.of(design.name, design.text), Report())
    assert root is not None
    text = _edited(design.text, [(_span(root, key), _written(value)) for key, value in changes.items()])

    def analysed(text: str) -> Analysis:
        files = {"files": design.files} if design.files else {}
        found = analyse_text(text, path.name, path.parent, None, allow_use=allow_use, **files)
        if found.file is None or (not found.ok and found.status != ExpectationError.exit_status):
            raise found.error()
        return found

    found = analysed(text)
    if edits := _expected(found):
        text = _edited(text, edits)
        found = analysed(text)
    return text, found


def _span(root: document.Node, path: str) -> Span:
    node = find_value(root, path)
    if node is None or isinstance(node, Entries):
        message = f"{quote(path)} is not written in the spec, so its value cannot be replaced there"
        raise UsageError(f"{message}: write `{path.rpartition('.')[2]}: …` at its place first")
    return node.span


def _written(value: Any) -> str:
    return str(value) if isinstance(value, RawText) else as_text(value)


def _edited(text: str, edits: list[Edit]) -> str:
    """Return a text with ranges replaced."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for span, new in sorted(edits, key=lambda edit: edit[0][1:], reverse=True):
        first, last = starts[span.line - 1] + span.column - 1, starts[span.end_line - 1] + span.end_column - 1
        text = text[:first] + new + text[last:]
    return text


def _expected(found: Analysis) -> list[Edit]:
    """Return edits of the plain numbers in `expect:` that the model does not meet."""
    expect = found.file.expect if found.file else None
    if found.ok or expect is None or found.model is None:
        return []
    wrong = {each.span for each in found.diagnostics}
    nodes = {key: node for key in FIGURES if isinstance(node := expect.get(key), Scalar)}
    return [
        (node.span, format(_figure(found.model, key), "_" if "_" in node.text else "d")) for key, node in nodes.items()
        if node.span in wrong and re.fullmatch(r"\d[\d_]*", node.text)
    ]  # fmt: skip


def _figure(model: ModelSpec, key: str) -> int:
    from seqblocks.cost import macs, state_bytes, tokens_of

    if key == "state_bytes":
        return state_bytes(model.graph, "float32")
    if key == "flops_per_token":
        return round(2 * (macs(model.graph, tokens_of(model)) or 0))
    return count(model.graph, active=key == "active_params")
