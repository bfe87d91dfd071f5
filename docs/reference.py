"""Write the parts of docs/language/ that are generated from the declarations of the verbs.

    python docs/reference.py            rewrite them in place
    python docs/reference.py --check    exit with 1 if a committed page is out of date

Generated parts are between `<!-- begin NAME -->` and `<!-- end NAME -->`. The rest is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from seqblocks.combinators import COMBINATORS, find_combinator
from seqblocks.descriptions import reference
from seqblocks.descriptions.reference import Argument, Verb
from seqblocks.language.expressions import FUNCTIONS
from seqblocks.op import Op, Port
from seqblocks.parameters import INITIALISERS

FOLDER = Path(__file__).resolve().parent / "language"
PART = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.S)


def parts() -> dict[str, str]:
    """Return the generated parts by name. The list of functions is part of a sentence; the others are whole lines."""
    primitives = (verb for verb in reference.verbs().values() if issubclass(verb, Op) and verb.builtin)
    made = {name: f"\n{section(find_combinator(name))}\n" for name in COMBINATORS}
    made["primitives"] = "\n" + "\n\n".join(map(section, primitives)) + "\n"
    made["initialisers"] = "\n" + "\n".join(initialisers()) + "\n"
    return made | {"functions": ", ".join(f"`{name}`" for name in FUNCTIONS)}


def section(verb: Verb) -> str:
    """Return the section of one verb: heading, description, inputs, arguments."""
    inputs = [_input(port) for port in reference.ports(verb) if _is_notable(port)]
    if issubclass(verb, Op) and verb.source:
        inputs.append(f"- source: {verb.source}")
    rows = [_row(argument) for argument in reference.arguments(verb)]
    table = ["| argument | takes | default | |", "|---|---|---|---|", *rows] if rows else []
    paragraphs = (f"## {verb.verb}", reference.about(verb), "\n".join(inputs), "\n".join(table))
    return "\n\n".join(filter(None, paragraphs))


def _is_notable(port: Port) -> bool:
    """Return whether a port is anything but one sequence from the previous step."""
    return not port.main or port.joins or port.kinds != ("sequence",)


def _input(port: Port) -> str:
    optional = ", optional" if port.optional and not port.main else ""
    return f"- input `{reference.port_key(port)}`{optional}: {reference.describe_port(port)}"


def _row(argument: Argument) -> str:
    default = reference.describe_default(argument)
    shown = "required" if argument.required else f"`{default}`" if default else ""
    takes = reference.describe_type(argument).replace("|", r"\|")
    return f"| `{argument.name}` | {takes} | {shown} | {argument.about} |"


def initialisers() -> Iterator[str]:
    """Yield the table of initialisers."""
    yield from ("| name | draws |", "|---|---|")
    for name, known in INITIALISERS.items():
        arguments = ", ".join(a if default is None else f"{a}={default:g}" for a, default in known.arguments)
        yield f"| `{name}{f'({arguments})' if arguments else ''}` | {known.about} |"


def main(arguments: list[str]) -> int:
    made = parts()
    old = {path: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.md"))}
    found = [part[1] for text in old.values() for part in PART.finditer(text)]
    if sorted(found) != sorted(made):
        raise SystemExit(f"{FOLDER.name}/ has the parts {sorted(found)}, and there are {sorted(made)}")
    new = {
        path: PART.sub(lambda part: f"<!-- begin {part[1]} -->{made[part[1]]}<!-- end {part[1]} -->", text)
        for path, text in old.items()
    }
    if "--check" in arguments:
        return int(old != new)
    for path, text in new.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
