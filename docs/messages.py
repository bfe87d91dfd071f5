"""Write docs/messages.md: the messages of all faulty specs in tests/golden/faults/, by their codes.

    python docs/messages.py            rewrite the page
    python docs/messages.py --check    exit with 1 if the committed page is out of date
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from seqblocks.cli.codes import CODES

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "messages.md"
GOLDEN = ROOT / "tests" / "golden" / "faults"
DIAGNOSTIC = re.compile(r"(?:error|warning)\[(\w+)\]: (.+)")
REMARK = re.compile(r" += ((?:expected|found|hint): .+)")

HEAD = """\
# Messages

<!-- `python docs/messages.py` writes this page from tests/golden/faults/. -->

Every kind of message about a spec, by its code. The name in brackets is that of a file in
[tests/golden/faults](../tests/golden/faults): `NAME.yaml` has the fault, and `NAME.txt` shows the
message as it is printed, with the faulty line and notes. `seqblocks explain E401` shows one code
with an example and its fix.
"""


def page() -> str:
    """Return the whole page."""
    messages: dict[str, dict[str, str]] = {code: {} for code in CODES}
    for path in sorted(GOLDEN.glob("*.txt")):
        for code, text in _messages(path.read_text("utf-8")):
            first, _, rest = text.partition("\n")
            messages[code].setdefault(_kind(text), "\n".join(filter(None, (f"{first}  [{path.stem}]", rest))))
    return "\n".join([HEAD, *(_section(code, [*found.values()]) for code, found in messages.items())])


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield the code of each printed diagnostic, and its message with what was expected and found, and its hint."""
    for diagnostic in text.split("\n\n"):
        first, *lines = diagnostic.splitlines()
        if match := DIAGNOSTIC.fullmatch(first):
            remarks = [f"    {remark[1]}" for line in lines if (remark := REMARK.fullmatch(line))]
            yield match[1], "\n".join([match[2], *remarks])


def _kind(text: str) -> str:
    """Return a message and its hint without quoted names and numbers, in which messages of a kind differ."""
    said = (line for line in text.splitlines() if not line.startswith(("    expected:", "    found:")))
    return re.sub(r"'[^']*'|`[^`]*`|[\d.,]*\d", "…", "\n".join(said))


def _section(code: str, messages: list[str]) -> str:
    known = CODES[code]
    about = textwrap.fill(known.about, 100, break_long_words=False, break_on_hyphens=False)
    listed = "```text\n" + "\n\n".join(messages) + "\n```"
    if not messages:
        listed = "No file has this fault: the command line reports it."
    return f"## {code}: {known.title}\n\n{about}\n\n{listed}\n"


def main(arguments: list[str]) -> int:
    new = page()
    if "--check" in arguments:
        return int(TARGET.read_text("utf-8") != new)
    TARGET.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
