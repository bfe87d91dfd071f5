"""Load the catalogue of error codes from `codes.yaml`, for `seqblocks explain E401`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml


class Code(NamedTuple):
    """Describe one error code. `example` and `fix` are specs, or empty if no spec can produce the code."""

    title: str
    about: str
    example: str = ""
    fix: str = ""


def _read() -> dict[str, Code]:
    data = yaml.safe_load(Path(__file__).with_name("codes.yaml").read_text(encoding="utf-8"))
    return {name: Code(**entry) for name, entry in data.items()}


CODES: dict[str, Code] = _read()


def text(code: str) -> str:
    """Return the description of a code as text for a terminal."""
    known = CODES[code]
    out = [f"{code}: {known.title}", "", known.about]
    for label, example in (("For instance", known.example), ("Fixed", known.fix)):
        if example and len(example) < 1000:
            out += ["", f"{label}:", *("  " + line for line in example.splitlines())]
    return "\n".join(out)
