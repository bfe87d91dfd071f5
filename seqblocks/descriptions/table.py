"""Lay out the summary of a model as a table: a tree of steps by their YAML names, with parameters and cost."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from itertools import pairwise
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqblocks import markup
from seqblocks.descriptions.numbers import bytes_of, count, short
from seqblocks.descriptions.summary import Row, Summary
from seqblocks.errors import visible


def text(found: Summary, width: int | None = None, batch: int = 1) -> str:
    """Return the table and the totals as text, `width` columns wide: by default as wide as the terminal."""
    out = Console(file=io.StringIO(), width=width, force_terminal=False, force_jupyter=False, highlight=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with out.capture() as captured:
        write(found, out, encoding, batch)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def write(found: Summary, out: Console, encoding: str | None, batch: int = 1) -> None:
    """Print the table and the totals to a console, with the characters that an encoding has."""
    out.width = max(out.width, NARROWEST)
    plain = not (encoding or "").lower().startswith("utf")
    wires = f"{_text(found.input)} {_arrow(plain)} {_text(found.output)}"
    out.print(f"[bold]{_text(found.name)}[/]  {wires}", soft_wrap=True)
    out.print(_table(found, out.width, plain))
    for label, value in totals(found, batch):
        first, *more = wrap(value, max(out.width - LABEL, 20), break_long_words=False, break_on_hyphens=False)
        out.print(f"[bold]{label:<{LABEL}}[/]{_text(first)}", soft_wrap=True)
        for line in more:
            out.print(" " * LABEL + _text(line), soft_wrap=True)


def html(found: Summary) -> str:
    """Return the table and the totals as HTML."""
    columns = _columns(list(_flat(found.rows, 0)), found.counted_per, plain=False)
    columns.pop("in", None)
    titles = {"MACs": f"MACs/{found.counted_per}"}
    numbers = [titles.get(title, title) for title in NUMBERS]
    made = markup.table([titles.get(title, title) for title in columns], zip(*columns.values(), strict=True), numbers)
    title = f"{found.name}: {found.input} → {found.output}"
    return markup.titled(title, made) + markup.lines(totals(found))


NUMBERS = ("rate", "ahead", "params", "MACs", "state")  # titles of columns of numbers
NARROWEST = 60  # minimum width in columns: below it, wrapped lines are more readable than truncated cells
STYLES = {"verb": "cyan", "in": "dim", "out": "dim", "notes": "yellow"}
LABEL = 12  # width of the labels below the table

# Columns dropped one after another in a narrow terminal; output and parameters always stay. Without the column "verb",
# the verb follows the name, as in the YAML. Names are truncated as a last resort.
_DROPPED = ("in", "rate", "ahead", "notes", "verb", "state", "MACs")
LAYOUTS = tuple(_DROPPED[:count] for count in (0, 1, 3, 4, 5, 6, 7))


def _table(found: Summary, width: int, plain: bool) -> Table:
    """Lay out the table for the width of the terminal, dropping columns that would be too narrow to read."""
    rows = list(_flat(found.rows, 0))
    titles = {"in": f"in {_arrow(plain)} out", "MACs": f"MACs/{found.counted_per}"}
    columns, widths = _fitting(rows, _columns(rows, found.counted_per, plain), titles, width, plain)
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for title in columns:
        table.add_column(
            titles.get(title, title),
            style=STYLES.get(title),
            justify="right" if title in NUMBERS else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=widths[title] if title != "step" else None,
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(_text, cells))
    return table


def _fitting(
    rows: list[tuple[Row, int]], columns: dict[str, list[str]], titles: dict[str, str], width: int, plain: bool
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the columns and widths of the first layout that fits."""
    for dropped in LAYOUTS:
        kept = {title: cells for title, cells in columns.items() if title not in dropped}
        if "in" in kept:
            kept.pop("out", None)
        if "verb" in dropped:
            kept["step"] = [_step(row, depth) for row, depth in rows]
        widths = {title: max(map(len, (titles.get(title, title), *cells))) for title, cells in kept.items()}
        spare = (
            width - sum(widths.values()) - 3 * (len(kept) - 1)
        )  # columns are separated by a space, a rule and a space
        if spare >= 0:
            return kept, widths
    room = max(widths["step"] + spare, 0)
    return kept | {"step": [_step(row, depth, room, plain) for row, depth in rows]}, widths


def _step(row: Row, depth: int, room: int = 10**9, plain: bool = False) -> str:
    """Return a name with its verb. If it is too long, the name is truncated, since the verb is more informative."""
    name = _name(row)
    verb = f": {row.verb}" if row.verb and row.verb != row.names[0] else ""
    over = depth + len(name) + len(verb) - room
    if over > 0:
        dots = "..." if plain else "…"
        name = name[: max(len(name) - over - len(dots), 1)] + dots
    return " " * depth + name + verb


def _columns(rows: list[tuple[Row, int]], per: str, plain: bool) -> dict[str, list[str]]:
    columns = {
        "step": ["  " * depth + _name(row) for row, depth in rows],
        "verb": [row.verb if row.verb != row.names[0] else "" for row, _ in rows],
        "in": [
            f"{row.input} {_arrow(plain)} {row.output}" if row.input != row.output else row.output for row, _ in rows
        ],
        "out": [row.output for row, _ in rows],
        "rate": [str(row.rate) if row.rate != 1 else "-" for row, _ in rows],
        "ahead": [str(row.lookahead) if row.lookahead else "-" for row, _ in rows],
        "params": [_number(row.params) for row, _ in rows],
        "MACs": [_macs(row, per) for row, _ in rows],
        "state": [_number(row.state) for row, _ in rows],
        "notes": [", ".join(row.remarks) for row, _ in rows],
    }
    # omit empty columns
    return {title: cells for title, cells in columns.items() if any(cell.strip("- ") for cell in cells)}


def totals(found: Summary, batch: int = 1) -> Iterator[tuple[str, str]]:
    """Yield the lines below the table: labels and values."""
    size = bytes_of(found.params_bytes)
    yield "parameters", f"{found.params:,}  ({short(found.params)}, {size} in {found.dtype})"
    if found.active_params != found.params:
        yield "active", f"{found.active_params:,} parameters per token  ({short(found.active_params)})"
    yield "cost", _cost(found, batch)
    if len(found.inputs) > 1:
        macs = "depends on its length" if found.context_macs is None else short(found.context_macs, "MACs")
        yield "context", f"{macs}, once for {', '.join([*found.inputs][1:])}"
    if found.state and found.streams is None:
        many = f", {bytes_of(batch * found.state_bytes)} for {batch}" if batch > 1 else ""
        yield "state", f"{found.state:,} elements, {bytes_of(found.state_bytes)} per sequence{many}"
    if found.lookahead is not None:
        yield "causal", f"no: {_depend(found)}, because of {found.future}" if found.lookahead else "yes"
    if found.sample_rate and found.lookahead is not None:
        yield "latency", _latency(found)
    how = "step by step" if found.frame_size == 1 else f"{found.frame_size} tokens at a time"
    yield "streaming", f"yes, {how}" if found.streams is None else f"no: {found.streams}"
    for note in found.notes:
        yield "note", note


def _depend(found: Summary) -> str:
    """Return which outputs depend on how many later tokens, as text."""
    ahead = {name: tokens for name, tokens in found.lookaheads.items() if tokens}
    return ", ".join(
        f"{name} depends on {'every later token' if tokens == 'all' else f'{_tokens(tokens)} ahead'}"
        for name, tokens in (ahead or {"an output": found.lookahead or 0}).items()
    )


def _latency(found: Summary) -> str:
    """Return how long an output waits for later samples, as text."""
    if found.latency is None:
        return "the whole sequence"
    samples = f"{found.latency:,} sample{'s' if found.latency != 1 else ''}"
    frame = f", because of frames of {found.frame_size:,}" if found.frame_size > 1 and found.streams is None else ""
    return f"{samples} = {found.latency_ms:.4g} ms at {found.sample_rate:,g} Hz{frame}"


def _cost(found: Summary, batch: int) -> str:
    """Return the cost per token, or per input for models counted by inputs, and that of the batch, as text."""
    tokens = found.tokens
    whole = "" if found.input_macs is None else short(batch * found.input_macs, "MACs")
    if found.counted_per != "token" and found.input_macs is not None:
        one, flops = short(found.input_macs, "MACs"), short(2 * found.input_macs, "FLOPs")
        each = f"{one} = {flops} per {found.counted_per}" + (f" ({tokens:,} tokens)" if tokens else "")
        return each + (f"; {whole} for {batch}" if batch > 1 else "")
    if found.open_memories:
        return f"MACs per token depend on the length of {', '.join(found.open_memories)}, which the spec does not fix"
    if found.macs_per_token is None:
        return "MACs per token depend on the length of the sequence: give --length"
    each = f"{count(found.macs_per_token)} MACs = {count(2 * found.macs_per_token)} FLOPs per token"
    return each + (f"; {whole} for {batch} x {tokens:,} tokens" if tokens and whole else "")


def _tokens(count: int | str) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _flat(rows: list[Row], depth: int) -> Iterator[tuple[Row, int]]:
    for row in rows:
        yield row, depth
        yield from _flat(row.rows, depth + 1)


def _name(row: Row) -> str:
    if len(row.names) == 1:
        return row.names[0]
    if not all(name.isdecimal() for name in row.names):
        return f"{', '.join(row.names)} ({len(row.names)} x)"
    return f"{_ranges([int(name) for name in row.names])} ({len(row.names)} x)"


def _ranges(numbers: list[int]) -> str:
    """Abbreviate layer numbers: 0-5; 0, 2, ..., 22 if evenly spaced; else runs such as 0-2, 4, with an ellipsis."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(shown if len(shown) < 5 else [*shown[:2], "...", shown[-1]])


def _macs(row: Row, per: str) -> str:
    macs = row.macs if per == "token" else row.input_macs
    if macs is None:
        return "?"
    return _number(macs) if per == "token" else short(macs) if macs else "-"


def _number(value: float) -> str:
    return count(value) if value else "-"


def _arrow(plain: bool) -> str:
    return "->" if plain else "→"


def _text(value: str) -> str:
    return escape(visible(value))
