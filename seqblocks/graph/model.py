"""The analysed spec of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

from seqblocks.errors import Diagnostic, visible
from seqblocks.graph.names import count
from seqblocks.graph.nodes import Entry, Graph
from seqblocks.record import Record
from seqblocks.types import Wire


class SpecSource(NamedTuple):
    """The text of a spec, its overrides and the files it uses, which `save` stores with the weights.

    origin: the config.json that came with the weights, which `convert` writes again.
    """

    name: str
    text: str
    overrides: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # texts: by relative path, bundled files by name
    origin: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"SpecSource({self.name!r}, {len(self.text)} characters)"


class ModelSpec(Record):
    """An analysed spec, as returned by `load_model`, passed to `build_model`, and stored in a model as `model.spec`.

    input, output: the types of the model's wires. graph: its steps. types, labels: of each value, by number. source:
    the text of the spec. inputs, outputs: all of them by name, if the spec has `inputs:` or `outputs:`; `input` and
    `output` are then the first ones.
    """

    name: str
    input: Wire
    graph: Graph
    types: dict[int, Wire | None]
    labels: dict[int, str]
    expect: Any = None
    checkpoint: tuple[Entry, ...] = ()
    overridden: tuple[str, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()  # those of its file
    notes: tuple[str, ...] = ()  # remarks on overrides that repeat what the spec says
    source: SpecSource | None = None
    inputs: dict[str, Wire] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ModelSpec {self.title}>"

    def _repr_html_(self) -> str:
        from seqblocks import markup  # only needed in a notebook

        return markup.titled(self.title, self.graph._repr_html_())

    @property
    def title(self) -> str:
        """The model in one line: its name, input, output and number of parameters."""
        return f"{visible(self.name)}: {self.input_text} -> {self.output_text}, {count(self.graph):,} parameters"

    @property
    def output(self) -> Wire | None:
        return self.types[self.graph.result]

    @property
    def outputs(self) -> dict[str, Wire | None]:
        return {name: self.types[value] for name, value in self.graph.outputs.items()}

    @property
    def input_text(self) -> str:
        """The input as text, or all inputs with their names."""
        return ", ".join(f"{name} {wire}" for name, wire in self.inputs.items()) or str(self.input)

    @property
    def output_text(self) -> str:
        return ", ".join(f"{name} {wire}" for name, wire in self.outputs.items()) or str(self.output or "unknown")
