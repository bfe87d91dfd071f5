"""Compare several designs: their figures side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqblocks.analysis.analyse import Folders
from seqblocks.architect import tables
from seqblocks.architect.designs import find_design, merged
from seqblocks.architect.facts import FACTS, Value, measure, shown
from seqblocks.cost import dtype_named
from seqblocks.errors import Diagnostic, SpecError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.record import Record

_MACS = "macs_per_token"
_HIDDEN = ("flops_per_token", "input_macs")  # in the text: twice the MACs; a product of them
_ZERO = ("kv_bytes_per_token", "latency")  # in the text only if a model has it


class Comparison(Record):
    """Figures of several designs. `print` and notebooks show them as a table.

    labels: of the designs, as the caller wrote them. facts: for each design its figures by name (see
    `architect.facts.FACTS`), then `macs_per_token@LENGTH` for each requested length; None: unknown. warnings: of the
    specs.
    """

    labels: list[str]
    facts: list[dict[str, Value]]
    lengths: tuple[int, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from seqblocks import markup  # only needed in a notebook

        header, rows = self._table(ratios=True)
        return markup.table(header, rows, header[1:])

    def to_dict(self) -> list[dict[str, Value]]:
        """Return a dict for each design: `pandas.DataFrame(comparison.to_dict())`."""
        return [{"spec": label, **facts} for label, facts in zip(self.labels, self.facts, strict=True)]

    def text(self) -> str:
        """Return a table with a column for each design, and the ratio of each number to that of the first."""
        return tables.aligned(*self._table(ratios=True))

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return tables.markdown(*self._table(ratios=False))

    def csv(self) -> str:
        """Return a line for each design, with unrounded numbers."""
        names = list(self.facts[0])
        rows = ([label, *(facts[name] for name in names)] for label, facts in zip(self.labels, self.facts, strict=True))
        return tables.csv(["spec", *names], rows)

    def _table(self, ratios: bool) -> tuple[list[str], list[list[str]]]:
        rows = []
        for name in self.facts[0]:
            values = [facts[name] for facts in self.facts]
            if self._is_shown(name, values):
                rows.append([_title(name), *_cells(name, values, ratios)])
        return ["", *self.labels], rows

    def _is_shown(self, name: str, values: list[Value]) -> bool:
        if name in _HIDDEN:
            return name == "input_macs" and all(facts[_MACS] is None for facts in self.facts)
        if name == "active_params":
            return values != [facts["params"] for facts in self.facts]
        return any(values) if name in _ZERO else True


def _title(name: str) -> str:
    base, _, length = name.partition("@")
    return FACTS[base].title + (f", {int(length):,} tokens" if length else "")


def _cells(name: str, values: Sequence[Value], ratios: bool) -> list[str]:
    base = name.partition("@")[0]
    texts = [shown(base, value) for value in values]
    first = values[0]
    for at, value in enumerate(values if ratios and _is_number(first) and first else ()):
        if at and _is_number(value) and value != first:
            texts[at] += f" ({ratio(value, first)})"
    return texts


def ratio(value: float, first: float) -> str:
    """Return a ratio as text: 1.62 x."""
    found = value / first
    return f"{found:,.0f} x" if found >= 1000 else f"{found:.3g} x"


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(
    *specs: str | os.PathLike[str] | ModelSpec | Any,
    set: Mapping[str, Any] | None = None,
    lengths: int | Iterable[int] = (),
    dtype: str = "float32",
    allow_use: Folders = (),
    strict: bool = False,
) -> Comparison:
    """Compare the figures of specs, without building them.

    specs: paths, bundled names, folders written by `save`, `git:REV:PATH`, each with overrides at its end
    (`"vil_tiny@dim=256"`), or checked or built models. set: overrides of all of them. lengths: numbers of tokens at
    which to count MACs per token, since attention costs more in longer sequences; None where a spec does not take a
    length. dtype: in which sizes in bytes are counted.

    Raises SpecError with the faults of all specs, UsageError for an invalid call.
    """
    if not specs:
        raise UsageError("compare takes at least one spec")
    sizes = checked_lengths(lengths)
    kind = dtype_named(str(dtype), "dtype")
    designs = [find_design(each, set) for each in specs]
    models, errors = [], []
    for design in designs:
        try:
            models.append(design.load(allow_use=allow_use, strict=strict))
        except SpecError as error:
            errors.append(error)
    if errors:
        raise merged(errors)
    facts = [_facts(model, kind, sizes) for model in models]
    remarks = dict.fromkeys(each for model in models for each in model.warnings)
    return Comparison([design.label for design in designs], facts, sizes, tuple(remarks))


def _facts(model: ModelSpec, dtype: str, lengths: tuple[int, ...]) -> dict[str, Value]:
    found = {name: measure(model, name, dtype) for name in FACTS}
    return found | {f"{_MACS}@{length}": measure(model, _MACS, dtype, length) for length in lengths}


def checked_lengths(lengths: int | Iterable[int]) -> tuple[int, ...]:
    """Return numbers of tokens, each once. Raises UsageError for others."""
    found = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int) or not 1 <= each <= 10**9:
            raise UsageError(f"lengths are whole numbers from 1 to 1,000,000,000, not {each!r}")
    return tuple(dict.fromkeys(found))
