"""Accuracy against length, as an SVG without a script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

from seqblocks.markup import COLOURS, text
from seqblocks.probes.training import Result

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 48, 16, 34, 44  # pixels; the last four are margins
LINE = 18  # height of a line of the legend


def plot(results: Sequence[Result], title: str) -> str:
    """Return a picture with a line for each task, and for each of several rates.

    It is the mean of the seeds at each length, with the lowest and highest. A dotted line is the accuracy of a guess; a
    filled dot is the length of the training.
    """
    groups: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        groups.setdefault((result.task, result.rate), []).append(result)
    has_rates = len(groups) > len({name for name, _ in groups})
    lengths = sorted({result.length for result in results})
    height = HEIGHT + LINE * len(groups)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="accuracy against length" {font}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{text(title)}: accuracy against length</text>',
        *_axes(lengths),
    ]
    for at, ((name, rate), own) in enumerate(groups.items()):
        said = f"{name}, rate {rate:g}" if has_rates else name
        parts += _line(own, said, lengths, COLOURS[at % len(COLOURS)], HEIGHT + LINE * at)
    return "\n".join([*parts, "</svg>", ""])


def _x(length: int, lengths: Sequence[int]) -> float:
    """Return the place of a length; equal ratios have equal distances."""
    first, last = math.log(lengths[0]), math.log(lengths[-1])
    part = (math.log(length) - first) / (last - first) if last > first else 0.5
    return LEFT + (WIDTH - LEFT - RIGHT) * part


def _y(accuracy: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - accuracy)


def _axes(lengths: Sequence[int]) -> Iterator[str]:
    for accuracy in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(accuracy)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{accuracy:g}</text>'
    last = -math.inf
    for length in lengths:
        x = _x(length, lengths)
        if x - last > 28:  # labels that are closer would overlap
            yield f'<text x="{x:.1f}" y="{_y(0) + 16:.1f}" text-anchor="middle">{length}</text>'
            last = x


def _line(
    results: Sequence[Result], name: str, lengths: Sequence[int], colour: str, legend: int
) -> Iterator[str]:
    found = {length: [r.accuracy for r in results if r.length == length] for length in lengths}
    means = {length: mean(values) for length, values in found.items() if values}
    points = " ".join(f"{_x(length, lengths):.1f},{_y(value):.1f}" for length, value in means.items())
    one = results[0]
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    ends = [_x(length, lengths) for length in (min(means), max(means))]
    chance = f'x1="{ends[0]:.1f}" y1="{_y(one.chance):.1f}" x2="{ends[1]:.1f}" y2="{_y(one.chance):.1f}"'
    yield f'<line {chance} stroke="{colour}" stroke-dasharray="2 4"/>'
    for length, value in means.items():
        x, low, high = _x(length, lengths), _y(min(found[length])), _y(max(found[length]))
        yield f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        fill = colour if length == one.trained_length else "#fff"
        yield f'<circle cx="{x:.1f}" cy="{_y(value):.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
    seeds = len({result.seed for result in results})
    said = f"{name}, trained at {one.trained_length}" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    yield f'<line x1="{LEFT}" y1="{legend}" x2="{LEFT + 24}" y2="{legend}" stroke="{colour}" stroke-width="3"/>'
    yield f'<text x="{LEFT + 32}" y="{legend + 4}">{text(said)} (dotted: a guess)</text>'
