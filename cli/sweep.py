"""`seqblocks sweep`: check a spec at every point of a grid; on request train or time each of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TextIO

from seqblocks._version import __version__
from seqblocks.architect import sweep as designs_of
from seqblocks.architect import tables
from seqblocks.architect.sweep import Row, Sweep, ladder, pareto, shown, sweep, title
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.compare import designs
from seqblocks.cli.fit import pairs
from seqblocks.cli.imports import import_torch
from seqblocks.cli.progress import progress
from seqblocks.errors import SpecError, UnavailableError, UsageError, unwritable, visible
from seqblocks.graph import ModelSpec

START = '{"key": "'  # of a line of --out


def run(options: argparse.Namespace) -> int:
    """Print a row for each point. Status 1: none is valid. A fault of all points is raised instead, but in JSON.

    What an interrupted sweep has found is printed, and continued with --out. So are the rows before one that cannot be
    kept.
    """
    more, measure = _measures(options)
    if options.out is not None:
        _check_out(options.out)
    found = sweep(
        designs([options.spec], options)[0], pairs(options.grid), where=options.where, lengths=options.lengths,
        dtype=options.dtype, tokens_per_parameter=options.tokens_per_parameter, more=more, measure_more=measure,
        allow_use=options.allow_use, strict=options.strict,
    )  # fmt: skip
    front = _front(options, found)
    if options.format == "csv" and not front and not options.ladder:
        return _stream(found, options)
    rows: list[Row] = []
    status, failure = 0, None
    try:
        for row in _resumed(found, options):
            rows.append(row)  # noqa: PERF402 - an interrupt keeps those that are done
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (UnavailableError, UsageError) as error:  # --out cannot be written any more
        if not rows:
            raise
        failure = error
    left_out = 0 if status or failure else found.points - len(rows)
    is_valid = bool(status or left_out) or not all(row.fault for row in rows)
    if not (is_valid or failure):
        status = SpecError.exit_status
        if len({row.fault for row in rows}) == 1:
            common = found.error(rows[0])
            if options.format != "json":
                raise common
            status = common.exit_status
    _print(found, rows, front, options, is_valid=is_valid, left_out=left_out)
    if failure:
        raise failure
    if status == INTERRUPTED and options.format == "text" and not options.quiet:
        again = f"; the same command continues {visible(options.out)}" if options.out else ""
        output.write(f"interrupted: these are the designs that were done{again}")
    return status


def _check_out(path: str) -> None:
    """Raise UsageError if a sweep could not be continued from there: a terminal, a pipe, a device."""
    if path == "-":
        raise UsageError("--out takes the name of a file, not -; --format csv prints rows as they are found")
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UsageError(f"--out {visible(path)} is not a file, so a sweep cannot be continued from it")


def _resumed(found: Sweep, options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows; those that --out already has are not computed again, new ones are added to it."""
    known = _known(options.out)
    with progress(options, f"{found.points:,} designs of {visible(options.spec)}") as advance:
        file = _append(options.out) if options.out else None
        try:
            for count, values in enumerate(found.values()):
                analysis = found.analyse(values)
                key = found.key(values, analysis)
                if key in known:
                    kept = known[key]
                    row = kept and kept._replace(values=values)  # the options may have been in another order
                else:
                    row = found.row(values, analysis)
                    if file:
                        _keep(file, key, row)
                advance((count + 1) / found.points)
                if row:
                    yield row
        finally:
            if file:
                with contextlib.suppress(OSError):  # all rows are flushed, or an error was reported
                    file.close()


def _known(path: str | None) -> dict[str, Row | None]:
    """Return the rows of an earlier run by their keys; None: the point was left out. A line cut short is none."""
    rows: dict[str, Row | None] = {}
    if path is None or not os.path.exists(path):
        return rows
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n") and line[: len(START)] == START[: len(line)]:
                    break
                try:
                    data = json.loads(line)
                    row = None if data["row"] is None else Row(**data["row"])
                    rows[str(data["key"])] = row
                except (ValueError, TypeError, LookupError):
                    raise UsageError(
                        f"--out {visible(path)}: line {number} was not written by seqblocks sweep; name another file"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--out {visible(path)} cannot be read: {getattr(error, 'strerror', error)}") from None
    return rows


def _append(path: str) -> TextIO:
    try:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed by the caller
        _drop_cut_line(file)
    except OSError as error:
        raise unwritable(f"--out {path}", error) from None
    return file


def _drop_cut_line(file: TextIO) -> None:
    """Remove a last line without an end, which a killed run left."""
    file.seek(0)
    size = 0
    for line in iter(file.readline, ""):
        if line.endswith("\n"):
            size = file.tell()
    file.truncate(size)


def _keep(file: TextIO, key: str, row: Row | None) -> None:
    data = None if row is None else {"values": row.values, "figures": row.figures, "fault": row.fault}
    try:
        file.write(json.dumps({"key": key, "row": data}) + "\n")
        file.flush()
    except OSError as error:
        raise unwritable(f"--out {file.name}", error) from None


# --- what is measured with torch --------------------------------------------------------------------------------------


def _measures(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[..., Mapping[str, Any]] | None]:
    """Return the columns of --probe and --bench with what determines them, and what fills them."""
    for option, of in (("seeds", "probe"), ("steps", "probe"), ("seconds", "bench")):
        if getattr(options, option) is not None and not getattr(options, of):
            raise UsageError(f"--{option} needs --{of}: without it, the designs are only analysed")
    if not options.probe and not options.bench:
        return {}, None
    torch = import_torch("training and timing require torch", shares_cores=not options.bench)
    functions: dict[str, Callable[[ModelSpec], float]] = {}
    settings: dict[str, Any] = {}
    for given in options.probe:
        from seqblocks.probes import TASKS
        from seqblocks.probes.tasks import ALIASES

        name = ALIASES.get(given, given)
        designs_of.check_columns([name], [*TASKS], "task")
        column = f"accuracy of {name}"
        functions[column] = partial(_probed, name=name, options=options)
        settings[column] = [options.steps, options.seeds or 1]
    if options.bench:
        from seqblocks.bench.measure import processor

        functions["seconds"] = partial(_timed, options=options)
        name = processor(torch.device("cpu"))
        settings["seconds"] = [options.bench, name, torch.get_num_threads(), torch.__version__]
    return settings, lambda model: {column: function(model) for column, function in functions.items()}


def _probed(model: ModelSpec, name: str, options: argparse.Namespace) -> float:
    """Return the accuracy at the length of training, the mean over the seeds."""
    from seqblocks.probes import TASKS, fit_task, probe

    fit_task(model, TASKS[name])
    found = []
    for seed in range(options.seeds or 1):
        results = probe(model, TASKS[name], seed, steps=options.steps)
        if results[0].interrupted:
            raise KeyboardInterrupt
        found.append(results[0].accuracy)
    return sum(found) / len(found)


def _timed(model: ModelSpec, options: argparse.Namespace) -> float:
    from seqblocks.bench import bench
    from seqblocks.model.builder import build_model

    length = options.lengths[0] if options.lengths and options.bench != "step" else None
    found = bench(build_model(model), options.bench, 1, length, options.seconds or 1.0)
    if found.interrupted:
        raise KeyboardInterrupt
    return found.seconds


# --- printing ---------------------------------------------------------------------------------------------------------


def _front(options: argparse.Namespace, found: Sweep) -> list[str]:
    """Return the columns of the Pareto front: those of --pareto, or the parameters and what was measured."""
    if options.pareto:
        names = [name.strip() for name in options.pareto.split(",")]
        designs_of.check_columns(names, found.columns)
        return names
    return ["params", *found.more] if found.more else []


def _stream(found: Sweep, options: argparse.Namespace) -> int:
    """Print lines of CSV as they are found."""
    columns = found.columns
    output.write(tables.csv(_head(found, columns), []))
    invalid = 0
    faults: dict[str, Row] = {}  # the first two: enough to tell whether all are the same
    try:
        for row in _resumed(found, options):
            output.write(tables.csv(_cells(columns, row), []), flush=True)
            invalid += bool(row.fault)
            if len(faults) < 2:
                faults[row.fault] = row
    except KeyboardInterrupt:
        return INTERRUPTED
    if invalid < found.points:
        return 0
    if len(faults) == 1:
        raise found.error(*faults.values())
    return SpecError.exit_status


def _head(found: Sweep, columns: list[str]) -> list[str]:
    return [*(option.path for option in found.options), *columns, "fault"]


def _cells(columns: list[str], row: Row) -> list[Any]:
    return [*row.values.values(), *(row.figures.get(name) for name in columns), row.fault]


def _print(
    found: Sweep, rows: list[Row], front: list[str], options: argparse.Namespace, is_valid: bool, left_out: int
) -> None:
    """Print all rows. is_valid: whether some point is. left_out: points that do not meet --where."""
    columns, invalid = found.columns, sum(bool(row.fault) for row in rows)
    if options.ladder:
        rows, columns = ladder(rows, options.ladder), ["budget", *columns]
    if front:
        marks = pareto(rows, front, [name for name in front if name.startswith("accuracy")])
        rows = [row._replace(figures={**row.figures, "front": mark}) for row, mark in zip(rows, marks, strict=True)]
        columns = [*columns, "front"]
    if options.format == "json":
        data = {"points": found.points, "rows": [row.as_data() for row in rows]}
        output.dump({"version": __version__, "ok": is_valid, "spec": options.spec, **data})
        return
    if options.format == "csv":
        output.write(tables.csv(_head(found, columns), [_cells(columns, row) for row in rows]))
        return
    header, cells = _table(found, rows, columns)
    if options.format == "markdown":
        output.write(tables.markdown(header, cells, 0))
    elif options.format == "html":
        output.write(_page(found, header, cells, options))
    else:
        output.write(tables.aligned(header, cells, 0))
        if not options.quiet:
            _remarks(found, front, {"invalid": invalid, "left out by --where": left_out})


def _table(found: Sweep, rows: list[Row], columns: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return a table without columns that follow from others or say nothing."""
    figures = [row.figures for row in rows if not row.fault]
    silent = {"six_nd"} | ({"tokens"} if "budget" not in columns else set())
    if all(each.get("active_params") == each["params"] for each in figures):
        silent.add("active_params")
    if not any(each["kv_bytes_per_token"] for each in figures):
        silent.add("kv_bytes_per_token")
    if found.lengths:
        silent.add("macs_per_token")
    names = [name for name in columns if name not in silent]
    has_faults = any(row.fault for row in rows)
    header = [*(option.path for option in found.options), *map(title, names), *["fault"] * has_faults]
    cells = []
    for row in rows:
        found_ = ["" if row.fault else shown(name, row.figures.get(name)) for name in names]
        cells.append([*map(str, row.values.values()), *found_, *[row.fault] * has_faults])
    return header, cells


def _remarks(found: Sweep, front: list[str], missing: dict[str, int]) -> None:
    """Print what follows the table. missing: how many points have no figures, by reason."""
    parts = [f"{count:,} of them {why}" for why, count in missing.items() if count]
    lines = [", ".join([f"{found.points:,} point{'s' * (found.points > 1)}", *parts])]
    lines.append(
        f"train FLOPs: three times a forward pass, for {found.tokens_per_parameter:g} tokens per parameter"
        + " (Chinchilla)" * (found.tokens_per_parameter == designs_of.CHINCHILLA)
    )
    if "seconds" in found.more:
        mode, name, threads, _ = found.more["seconds"]
        lines.append(f"seconds: {mode} on {name}, {threads} thread{'s' * (threads > 1)}")
    if front:
        lines.append(f"front: no other design is as good in {', '.join(map(title, front))}, and better in one")
    output.write("\n" + "\n".join(lines))


def _page(found: Sweep, header: list[str], cells: list[list[str]], options: argparse.Namespace) -> str:
    from seqblocks import markup

    name = visible(options.spec)
    numbers = header if not found.options else header[len(found.options) :]
    body = markup.titled(f"Designs of {name}", f"<figure>{markup.table(header, cells, numbers)}</figure>")
    return markup.page(f"Designs of {name}", body).rstrip("\n")
