"""What the composer of random specs (compose.py) knows of a spec that it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Step = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What a wire is: sequence, vector, image or tokens."""

    name: str
    width: int
    length: int | None = None  # None: open
    grid: tuple[int, int] | None = None
    rate: int = 1

    @property
    def place(self) -> Any:
        return self.name, self.length, self.rate, self.grid if self.name == "image" else None


@dataclass
class Body:
    """A list of steps under way: its wires by name, and what the next step reads."""

    now: Kind
    wires: dict[str, Kind]
    steps: list[Step] = field(default_factory=list)
    linears: list[tuple[str, int, int, bool]] = field(default_factory=list)  # that a tie may name
    depth: int = 0
    fixed: bool = False  # the kind that leaves must be the kind that entered, but for the width
    columns: bool = False  # in a scan by columns
    owned: bool = False  # in a scan whose orders own parameters
