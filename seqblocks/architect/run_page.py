"""The page about runs of `seqblocks try`: curves, figures, samples and pictures in one file that loads nothing."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seqblocks import markup
from seqblocks.architect.compare import compare
from seqblocks.architect.designs import CHECKPOINT, Design, find_design
from seqblocks.architect.diff import diff
from seqblocks.architect.grid import assignment
from seqblocks.errors import UsageError, visible
from seqblocks.markup import COLOURS, text
from seqblocks.picture.drawing import drawing_of
from seqblocks.record import Record

LOG, SETTINGS = "log.jsonl", "run.json"
WIDTH, HEIGHT, LEFT, BOTTOM = 820, 340, 72, 40  # of the curves, in pixels
ROOM = 1.25  # of the axis above the losses of untrained models
BUCKETS = 400  # of steps in a curve; each keeps its extremes
STYLE = (
    "pre{background:light-dark(#f5f5f5,#151b23);padding:1em;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".curves text{font:12px system-ui,sans-serif;fill:light-dark(#333,#c9d1d9)}"
    ".curves .grid{stroke:light-dark(#ddd,#3d444d)}"
)


class Run(Record):
    """A run. rows: of its log, in order; record: its settings and samples."""

    folder: Path
    record: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def label(self) -> str:
        return visible(str(self.folder))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the points of a figure over the steps; rows without it, or with one that is not finite, are left out.
        """
        pairs: list[tuple[Any, Any]] = [(row.get("step"), row.get(name)) for row in self.rows]
        if name == "held_out":  # read before and after a run too, which has no line in the log
            pairs = [(0, self.record.get("held_out_before")), *pairs]
            if self.rows and self.record.get("steps") == self.rows[-1].get("step") and pairs[-1][1] is None:
                pairs.append((self.record.get("steps"), self.record.get("held_out")))
        return [(float(x), float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def read_run(folder: Path) -> Run:
    """Read a run. Lines of the log that are cut short are left out. Raises UsageError if it is no run."""
    try:
        record = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        lines = (folder / LOG).read_text(encoding="utf-8").splitlines() if (folder / LOG).exists() else []
    except OSError as error:
        raise _no_run(folder, _unread(folder, error)) from None
    except ValueError:
        raise _no_run(folder, f"{SETTINGS} is damaged") from None
    if not isinstance(record, dict):
        raise _no_run(folder, f"{SETTINGS} is no mapping")
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return Run(folder, record, rows)


def _no_run(folder: Path, why: str) -> UsageError:
    return UsageError(f"{visible(str(folder))} is not a run of seqblocks try: {why}")


def _unread(folder: Path, error: OSError) -> str:
    """Return why a folder has no settings that can be read, and which one was probably meant."""
    try:
        if not folder.exists():
            return "there is no such folder"
        if not folder.is_dir():
            return "it is a file; name the folder that has it"
        if any((each / SETTINGS).is_file() for each in folder.iterdir()):
            return f"it is a folder of runs; name them, as in {visible(shlex.quote(str(folder)))}/*"
        if (folder.parent / SETTINGS).is_file():
            return f"it is a part of one; name {visible(shlex.quote(str(folder.parent)))}"
    except OSError:  # the folder cannot be listed, so the first error says more
        pass
    return f"{SETTINGS}: {error.strerror}"


def page(runs: list[Run]) -> str:
    """Return the page about one or several runs."""
    title = f"Run{'s' * (len(runs) > 1)}: {', '.join(run.label for run in runs)}"
    parts = [f"<h1>{text(title)}</h1>", "<h2>Curves</h2>", curves(runs), _ends(runs), _figures(runs)]
    return markup.page(title, "\n".join([*parts, *(_about(run, runs[0]) for run in runs)]), STYLE)


def _ends(runs: list[Run]) -> str:
    """Return a table of where each run ended."""
    head = ("run", "steps", "minutes", "tokens/s", "loss", "held out", "unit")
    rows = []
    for run in runs:
        loss, held = run.curve("loss"), run.curve("held_out")
        seconds = run.curve("seconds")
        rows.append((
            run.label, f"{int(loss[-1][0]):,}" if loss else "0", f"{seconds[-1][1] / 60:.1f}" if seconds else "",
            _speed(run), _loss(loss[-1][1]) if loss else "", _held_out(loss, held), str(run.record.get("unit", "")),
        ))  # fmt: skip
    ended = (f"<p>{text(run.label)}: {text(str(why))}</p>" for run in runs if (why := run.record.get("ended")))
    return f"<figure>{markup.table(head, rows, head[1:-1])}</figure>{''.join(ended)}"


def _loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def _held_out(loss: list[tuple[float, float]], held: list[tuple[float, float]]) -> str:
    """Return the last loss of held-out data, with its step if the model has learned since."""
    if not held:
        return ""
    step, value = held[-1]
    return _loss(value) + (f" (step {step:,.0f})" if loss and step != loss[-1][0] else "")


def _speed(run: Run) -> str:
    """Return the tokens of a second, of the step in the middle: the first ones are slower."""
    speeds = sorted(y for _, y in run.curve("tokens_per_second"))
    return f"{speeds[len(speeds) // 2]:,.0f}" if speeds else ""


def _design(run: Run) -> Design:
    return find_design(run.folder / CHECKPOINT)._replace(label=run.label)


def _figures(runs: list[Run]) -> str:
    """Return the figures of the models side by side."""
    try:
        return f"<h2>Models</h2><figure>{compare(*map(_design, runs))._repr_html_()}</figure>"
    except Exception as error:  # a damaged checkpoint does not hide the curves
        return f"<p>The models cannot be compared: {text(str(error))}</p>"


def _about(run: Run, first: Run) -> str:
    parts = [f"<h2>{text(run.label)}</h2>"]
    settings = run.record.get("settings")
    facts = {"spec": run.record.get("spec"), "data": run.record.get("data"), "machine": run.record.get("machine")}
    facts["sha256 of the data"] = str(run.record["digest"])[:16] if run.record.get("digest") else None
    facts |= settings if isinstance(settings, dict) else {}
    facts |= run.record["versions"] if isinstance(run.record.get("versions"), dict) else {}
    said = (f"{text(str(name))} {text(str(value))}" for name, value in facts.items() if value is not None)
    parts.append(f"<p>{', '.join(said)}</p>")
    for name, heading in (("before", "Before"), ("after", "After")):
        if isinstance(run.record.get(name), str):
            parts.append(f"<h3>{heading}</h3><pre>{text(run.record[name], lines=True)}</pre>")
    try:
        design = _design(run)
        if run is not first:
            found = text(str(diff(_design(first), design)), lines=True)
            parts.append(f"<h3>Differences from {text(first.label)}</h3><pre>{found}</pre>")
        parts.append(f"<figure>{drawing_of(design.analyse(), 3).svg()}</figure>")
        changed = "".join(f" --set {text(assignment(path, value))}" for path, value in design.overrides.items())
        heading = f"The spec, with{changed}" if changed else "The spec"
        source = text(design.text, lines=True)
        parts.append(f"<details><summary>{heading}</summary><pre>{source}</pre></details>")
    except Exception as error:
        parts.append(f"<p>There is no picture: {text(str(error))}</p>")
    return "\n".join(parts)


# --- curves -----------------------------------------------------------------------------------------------------------


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most four points of each of the buckets: its first, last, lowest and highest."""
    if len(points) <= 4 * BUCKETS:
        return points
    found: list[tuple[float, float]] = []
    size = len(points) / BUCKETS
    for at in range(BUCKETS):
        part = points[round(at * size) : round((at + 1) * size)]
        kept = {0, len(part) - 1, *(part.index(each(part, key=lambda p: p[1])) for each in (min, max))}
        found += [part[place] for place in sorted(kept)]
    return found


def curves(runs: list[Run]) -> str:
    """Return the losses of all runs over the steps; dashed: of data that was held out."""
    lines = [(run, name, run.curve(name)) for run in runs for name in ("loss", "held_out")]
    points = [point for _, _, found in lines for point in found]
    if not points:
        return "<p>Nothing has been logged yet.</p>"
    right, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    # A run that diverges would press the other curves flat.
    begin = max(found[0][1] for _, _, found in lines if found)
    is_cut = high > ROOM * begin > low
    if is_cut:
        high = ROOM * begin
    if high == low:
        low, high = low - 0.5, high + 0.5

    def place(x: float, y: float) -> str:
        y = min(y, high)
        across = LEFT + (WIDTH - LEFT - 10) * (x / right if right else 0)
        return f"{across:.1f},{10 + (HEIGHT - BOTTOM - 10) * (high - y) / (high - low):.1f}"

    out = [*_axes(right, low, high)]
    for run, name, found in lines:
        colour = COLOURS[runs.index(run) % len(COLOURS)]
        dash = ' stroke-dasharray="5 3" stroke-width="2"' if name == "held_out" else ' stroke-width="1.2" opacity="0.8"'
        path = " ".join(place(*point) for point in thinned(found))
        if len(found) > 1:
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
    out += _legend(runs)
    height = HEIGHT + 18 * len(runs)
    frame = f'class="curves" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    cut = f"; at the upper edge: {high:.3g} or more" if is_cut else ""
    unit = text(" or ".join(dict.fromkeys(str(run.record.get("unit", "loss")) for run in runs)))
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" aria-label="loss over steps">'
        f"{''.join(out)}</svg><figcaption>Loss in {unit} over steps; dashed: held out{cut}.</figcaption></figure>"
    )


def _axes(right: float, low: float, high: float) -> Iterable[str]:
    bottom = HEIGHT - BOTTOM
    for at in range(5):
        y = 10 + (bottom - 10) * at / 4
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 10}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{high - (high - low) * at / 4:.3g}</text>'
    for step in sorted({round(right * at / 4) for at in range(5)}):
        x = LEFT + (WIDTH - LEFT - 10) * (step / right if right else 0)
        anchor = "end" if step == right else "middle"  # the last one would be cut off
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{step:,}</text>'


def _legend(runs: list[Run]) -> Iterable[str]:
    for at, run in enumerate(runs):
        y = HEIGHT + 18 * at
        colour = COLOURS[at % len(COLOURS)]
        yield f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 24}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        yield f'<text x="{LEFT + 32}" y="{y + 4}">{text(run.label)}</text>'
