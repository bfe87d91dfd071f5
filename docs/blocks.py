"""Write the part of docs/blocks.md that is generated from the bundled blocks.

    python docs/blocks.py            rewrite it in place
    python docs/blocks.py --check    exit with 1 if the committed page is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from seqblocks.analysis import check, layers
from seqblocks.language.arguments import Argument
from seqblocks.language.document import Scalar, plain
from seqblocks.language.overrides import as_text
from seqblocks.language.spec import Block

TARGET = Path(__file__).resolve().parent / "blocks.md"
PART = re.compile(r"(?<=<!-- begin blocks -->\n).*(?=<!-- end blocks -->)", re.S)
TYPES = {
    "int": "whole number", "float": "number", "bool": "true or false", "any": "any value",
    "wire": "a width, or an input",
}  # fmt: skip


def sections() -> Iterator[str]:
    """Yield the section of each bundled file of blocks."""
    for name, _ in layers.block_files():
        file, _ = check.load_spec(name)
        yield f"## {name}\n\n{file.about}.\n"
        yield from map(section, file.blocks.values())


def section(block: Block) -> str:
    """Return the section of one block: its description, how it is called, its arguments."""
    about = f"{block.about[:1].upper()}{block.about[1:]}.\n\n" if block.about else ""
    rows = [_row(argument) for argument in block.args.values()]
    table = ["| argument | takes | default | |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"### {block.name}\n", f"{about}`{call(block)}`\n", *table, ""])


def call(block: Block) -> str:
    """Return a call with the required arguments."""
    names = [argument.name for argument in block.args.values() if argument.default is None]
    names += [] if "dim" in block.args else ["features"]
    return f'seqblocks.block("{block.name}", {", ".join(f"{name}=…" for name in names)})'


def _row(argument: Argument) -> str:
    default = "required" if argument.default is None else f"`{_default(argument)}`"
    cell = argument.meaning().replace("|", r"\|")
    takes = TYPES.get(argument.type, argument.type)
    return f"| `{argument.name}` | {takes} | {default} | {cell} |"


def _default(argument: Argument) -> str:
    node = argument.default
    return node.text if isinstance(node, Scalar) else as_text(plain(node)).replace('"', "") if node else ""


def main(arguments: list[str]) -> int:
    old = TARGET.read_text("utf-8")
    new = PART.sub(lambda _: "\n".join(["", *sections()]), old)
    if "--check" in arguments:
        return int(old != new)
    TARGET.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
