"""What the page shows of a spec, as data: the same on a server and, through Pyodide, in a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqblocks.analysis.analyse import Folders, analyse_text, yaml
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import SeqblocksError
from seqblocks.language.document import Mapping as Table
from seqblocks.language.document import Scalar
from seqblocks.language.spec_files import bundled
from seqblocks.picture.drawing import drawing_of

PAGE_MAX_PROBLEMS = 200  # errors, and as many warnings
PICTURE_MAX_BOXES = 4000  # in a picture: browsers lay it out anew with each key


def shown(
    text: str,
    name: str,
    values: Mapping[str, Any],
    base: Path | None = None,
    allow_use: Folders = (),
    files: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return problems, totals, rows of the table and the picture of a spec, and the numbers of its `let:`.

    values: overrides. files: texts of used files, in the place of a folder; see `seqblocks.analyse`.
    """
    changes = {key: yaml(json.dumps(value)) for key, value in values.items()}
    found = analyse_text(text, name, base, changes, files, allow_use, limit=PAGE_MAX_PROBLEMS)
    result: dict[str, Any] = {"ok": found.ok, "problems": [each.as_data() for each in found.diagnostics]}
    result["dropped"] = found.dropped
    result["let"] = _numbers(found.file.let) if found.file else {}
    try:
        drawing = drawing_of(found)
    except SeqblocksError as error:
        return {**result, "reason": str(error).splitlines()[0], "svg": None, "rows": [], "totals": []}
    count = sum(1 for each in drawing.boxes for _ in each.inside())
    drawn: dict[str, Any] = {"svg": None, "totals": drawing.totals, "title": drawing.title}
    if count > PICTURE_MAX_BOXES:
        drawn["reason"] = f"{count:,} boxes are too many for the picture"
    else:
        drawn["svg"] = drawing.svg()
    return {**result, **drawn, "rows": summarise(found.model).to_dict() if found.ok and found.model else []}


def _numbers(let: Table | None) -> dict[str, float]:
    """Return the entries of `let:` that are written as numbers, without .nan and .inf, which JSON does not have."""
    scalars = {name: node.value for name, _, node in let or () if isinstance(node, Scalar)}
    return {n: x for n, x in scalars.items() if type(x) is int or (type(x) is float and math.isfinite(x))}


def answer(name: str, given: str) -> str:
    """Answer a request of the page without a server: its name and its arguments as JSON; return JSON.

    `analyse` takes {text, name, set, files}, `examples` nothing, and `example` {name}.
    """
    data = json.loads(given)
    result: Any
    try:
        if name == "analyse":
            result = shown(data["text"], data["name"], data.get("set") or {}, files=data.get("files") or {})
        elif name == "example":
            result = {"name": f"{data['name']}.yaml", "text": bundled()[data["name"]].read_text("utf-8")}
        else:
            result = [*bundled()]
    except SeqblocksError as error:
        result = {"error": str(error)}
    return json.dumps(result)
