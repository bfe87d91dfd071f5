"""Compare two designs: their figures, their steps, and what a checkpoint of the first does in the second."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.analyse import Analysis, Folders
from seqblocks.architect import tables
from seqblocks.architect.changes import Change, changes, merged_names
from seqblocks.architect.compare import ratio
from seqblocks.architect.designs import find_design
from seqblocks.architect.facts import FACTS, Value, measure, shown
from seqblocks.architect.steps import Step, steps_of
from seqblocks.cost import dtype_named
from seqblocks.errors import Diagnostic
from seqblocks.graph import ModelSpec
from seqblocks.record import Record

_NUMBERED = re.compile(r"\.\d+\b")
_HIDDEN = ("flops_per_token", "input_macs")  # in the text: multiples of the MACs
MARKS = {"added": "+", "removed": "-", "moved": ">", "renamed": "=", "changed": "~"}


class Checkpoint(Record):
    """What loading the weights of A into B does, by names of tensors.

    fits: names with the same shape. reshaped: names with the shapes in A and in B. missing: names that only B has; they
    keep their initial values. unused: names that only A has. False if all tensors fit.
    """

    fits: list[str]
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: list[str]
    unused: list[str]

    def __bool__(self) -> bool:
        return bool(self.reshaped or self.missing or self.unused)

    def as_data(self) -> dict[str, Any]:
        reshaped = {name: {"before": [*old], "after": [*new]} for name, (old, new) in self.reshaped.items()}
        return {"fits": self.fits, "reshaped": reshaped, "missing": self.missing, "unused": self.unused}


class TensorChange(NamedTuple):
    """A tensor of two models whose values differ. relative: |b - a| / |a|, Euclidean norms in float64; infinite if a is
    zero. cosine: of the angle between a and b; 0 if one of them is zero."""

    name: str
    relative: float
    cosine: float


class Difference(Record):
    """How design B differs from design A; false if it does not. `print` shows it as text.

    facts: figures that differ, with their values in A and B; None: unknown. structure: changed steps. checkpoint: None
    if the graph of a model is unknown. tensors: those whose values differ, if they were compared
    (`seqblocks.checkpoint.values.differences`). faults: of A and of B; what they hide is not compared. analyses: of A
    and of B, for pictures.
    """

    labels: tuple[str, str]
    facts: dict[str, tuple[Value, Value]]
    structure: list[Change]
    checkpoint: Checkpoint | None
    tensors: list[TensorChange] | None = None
    faults: tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]] = ((), ())
    analyses: tuple[Analysis, ...] = ()

    def __bool__(self) -> bool:
        first, second = ([(each.code, each.message) for each in found] for found in self.faults)
        return bool(self.facts or self.structure or self.checkpoint or self.tensors or first != second)

    def __str__(self) -> str:
        return self.text()

    def as_data(self) -> dict[str, Any]:
        return {
            "different": bool(self),
            "facts": {name: {"before": old, "after": new} for name, (old, new) in self.facts.items()},
            "structure": [each.as_data() for each in self.structure],
            "checkpoint": None if self.checkpoint is None else self.checkpoint.as_data(),
            "tensors": None if self.tensors is None else [each._asdict() for each in self.tensors],
            "faults": [[each.as_data() for each in found] for found in self.faults],
        }

    def text(self) -> str:
        """Return all differences as text; of equal designs, that they are equal."""
        if not self:
            values = "" if self.tensors is None else ", the values"
            same = f"{self.labels[1]} has the figures, the steps{values} and the names of weights of {self.labels[0]}"
            return "\n".join([*self.fault_lines(), same])
        steps = ["steps", *(f"  {change_line(each)}" for each in self.structure)] if self.structure else []
        faults, weights = "\n".join(self.fault_lines()), "\n".join(self.weight_lines())
        parts = [faults, _aligned(*self.fact_table()), "\n".join(steps), weights, _aligned(*self.tensor_table())]
        return "\n\n".join(part for part in parts if part)

    def html(self) -> str:
        """Return all differences as a page that loads nothing."""
        from seqblocks.architect.diff_page import page  # only needed for a page

        return page(self)

    def fault_lines(self) -> list[str]:
        """Return a line for each design with faults."""
        lines = []
        for label, found in zip(self.labels, self.faults, strict=True):
            if found:
                first = f"{found[0].code}: {found[0].message}"
                more = f", and {len(found) - 1} more" if len(found) > 1 else ""
                lines.append(f"{label} has faults, so that not all of it is compared: {first}{more}")
        return lines

    def fact_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the figures that differ."""
        rows = []
        for name, (old, new) in self.facts.items():
            if name in _HIDDEN or (name == "active_params" and (old, new) == self.facts.get("params")):
                continue
            numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (old, new))
            times = ratio(new, old) if numbers and old else ""
            rows.append([FACTS[name].title, shown(name, old), shown(name, new), times])
        return ["", *self.labels, "ratio"], rows

    def weight_lines(self) -> list[str]:
        """Return a heading and lines about the tensors of a checkpoint, or nothing if all fit."""
        found = self.checkpoint
        if not found:
            return []
        lines = [f"weights of {self.labels[0]} in {self.labels[1]}"]
        others = f", {len(found.reshaped):,} have another shape" if found.reshaped else ""
        fit = "tensor fits" if len(found.fits) == 1 else "tensors fit"
        lines.append(f"  {len(found.fits):,} {fit}{others}")
        known = [*found.fits, *found.reshaped]
        for mark, names, where in (("+", found.missing, "second"), ("-", found.unused, "first")):
            lines += [f"  {mark} {each} only in the {where}" for each in _folded(names, known)]
        return lines

    def tensor_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the tensors whose values differ."""
        rows = [[each.name, f"{each.relative:.2e}", f"{each.cosine:.6f}"] for each in self.tensors or ()]
        return ["tensor", "relative difference", "cosine"], rows


def _aligned(header: list[str], rows: list[list[str]]) -> str:
    return tables.aligned(header, rows) if rows else ""


def _folded(names: list[str], known: list[str]) -> list[str]:
    """Return names of tensors with their number, those below a name that no known one has as one."""
    inner = {".".join(parts[:at]) for parts in (name.split(".") for name in known) for at in range(1, len(parts) + 1)}
    folded: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        folds = (".".join(parts[:at]) for at in range(1, len(parts)))
        folded.setdefault(next((f"{each}.*" for each in folds if each not in inner), name), []).append(name)
    kept = {name if len(below) > 1 else below[0]: len(below) for name, below in folded.items()}
    alike = Counter(_NUMBERED.sub("", name) for name in kept)
    notes = {}
    for name, count in kept.items():
        if count > 1:
            notes[name] = f"({count} tensors{' each' if alike[_NUMBERED.sub('', name)] > 1 else ''})"
    return merged_names(kept, notes)


def change_line(change: Change) -> str:
    """Return a change as a line of text."""
    start = f"{MARKS[change.kind]} {change.path}"
    verb = f" ({change.verb})" if change.verb not in ("", change.path.rpartition(".")[2]) else ""
    if change.kind in ("added", "removed"):
        return f"{start}{verb} {change.kind}, {change.params:,} parameters"
    if change.kind == "moved":
        ((_, old, new),) = change.details
        return f"{start}{verb} moved from place {int(old) + 1} to {int(new) + 1}"
    details = "; ".join(f"{what} {old or 'none'} -> {new or 'none'}" for what, old, new in change.details)
    return f"{start}{verb}: {details}"


def diff(
    a: Any, b: Any, *, set: Mapping[str, Any] | None = None, dtype: str = "float32", allow_use: Folders = ()
) -> Difference:
    """Return how spec B differs from spec A, without building them.

    a, b: as for `compare`: paths, bundled names, folders written by `save`, `git:REV:path`, with overrides, or models.
    set: overrides of both. dtype: in which sizes in bytes are counted. A spec with faults is compared as far as it is
    known. Raises UsageError if there is no such spec.
    """
    kind = dtype_named(str(dtype), "dtype")
    first, second = (find_design(each, set) for each in (a, b))
    old, new = (design.analyse(allow_use=allow_use) for design in (first, second))
    steps = [*_ends(old.model, new.model), *changes(_steps(old), _steps(new))]
    return Difference(
        (first.label, second.label), _facts(old, new, kind), steps, _checkpoint(old.model, new.model),
        None, (_faults(old), _faults(new)), (old, new),
    )  # fmt: skip


def _steps(found: Analysis) -> list[Step]:
    if found.lowered.body is None:
        return []
    return steps_of(found.lowered.body, found.model.labels if found.model else {})


def _faults(found: Analysis) -> tuple[Diagnostic, ...]:
    return tuple(each for each in found.diagnostics if each.severity == "error")


def _facts(a: Analysis, b: Analysis, dtype: str) -> dict[str, tuple[Value, Value]]:
    if not (a.ok and b.ok) or a.model is None or b.model is None:
        return {}
    both = {name: (measure(a.model, name, dtype), measure(b.model, name, dtype)) for name in FACTS}
    return {name: (old, new) for name, (old, new) in both.items() if old != new}


def _ends(a: ModelSpec | None, b: ModelSpec | None) -> list[Change]:
    """Return the change of the model's inputs and outputs."""
    if a is None or b is None:
        return []
    before, after = (f"{rate:,g} Hz" if (rate := model.input.sample_rate) else "" for model in (a, b))
    pairs = (
        ("input", a.input_text, b.input_text), ("sample rate", before, after), ("output", a.output_text, b.output_text),
    )  # fmt: skip
    details = tuple(each for each in pairs if each[1] != each[2])
    return [Change("changed", "model", "", details)] if details else []


def _checkpoint(a: ModelSpec | None, b: ModelSpec | None) -> Checkpoint | None:
    if a is None or b is None:
        return None
    old, new = ({item.name: item.parameter.shape for item in graph.parameters(model.graph)} for model in (a, b))
    both = [name for name in new if name in old]
    reshaped = {name: (old[name], new[name]) for name in both if old[name] != new[name]}
    missing, unused = [name for name in new if name not in old], [name for name in old if name not in new]
    fits = [name for name in both if name not in reshaped]
    return Checkpoint(fits, reshaped, missing, unused)
