"""Which form of which kernel each step would run, and why: asked of the facts, not of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import seqblocks.kernels  # noqa: F401  # its ops register themselves
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch import Verdict
from seqblocks.runtime.fusion import Fused, find
from seqblocks.types import Wire


@dataclass(slots=True)
class Step:
    """A step that uses a kernel. `names` are its paths: several where layers of a repeat agree.

    `form` is the one that would run, or None where the one asked for by name cannot.
    """

    names: list[str]
    verb: str
    kernel: str
    form: str | None
    verdicts: list[Verdict]
    tiles: dict[str, dict[str, int]]

    @property
    def pattern(self) -> str:
        """One path for all: layers that differ only by their label are written `*`."""
        rows = [name.split(".") for name in self.names]
        return ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*rows, strict=True))

    def reasons(self) -> list[str]:
        """Why the forms that come first in the order of `auto` do not run."""
        out = []
        for verdict in self.verdicts:
            if verdict.form == self.form:
                break
            if not verdict.can:
                out.append(f"{verdict.form}: {verdict.reason}")
        return out

    def as_data(self) -> dict[str, Any]:
        out = {key: getattr(self, key) for key in ("names", "verb", "kernel", "form", "tiles")}
        return out | {"forms": [verdict._asdict() for verdict in self.verdicts]}


def plan(model: ModelSpec, device: str, dtype: torch.dtype, arch: str, backend: str | None = None) -> list[Step]:
    """Every step of a model that uses a kernel, in order; alike ones together. BackendError for an unknown backend."""
    backend = dispatch.requested(backend)
    found: dict[Any, Step] = {}
    for path, node, fused in _walk(model.graph, model.types, ()):
        kernel, facts = node.calls or ("", {})
        facts = facts | (fused.facts() if fused else {})
        key = (tuple(label for label, layer in path if not layer), kernel, *sorted(facts.items()))
        behind = fused.nodes[1:] if fused else []
        name = " + ".join([".".join(label for label, _ in path), *(other.name for other in behind)])
        if key in found:
            found[key].names.append(name)
            continue
        verdicts = dispatch.why(kernel, device=device, dtype=dtype, arch=arch, **facts)
        can = [verdict.form for verdict in verdicts if verdict.can and backend in ("auto", verdict.form)]
        form = can[0] if can else None
        tiles = dispatch.tiles(kernel, form, arch, dtype=dtype, **facts) if form else {}
        found[key] = Step([name], node.verb, kernel, form, verdicts, tiles)
    return [*found.values()]


Path = tuple[tuple[str, bool], ...]  # labels, and whether each is that of a repeat's layer


def _walk(
    body: Graph, types: dict[int, Wire | None], path: Path, tail: Fused | None = None
) -> Iterator[tuple[Path, Node, Fused | None]]:
    """tail: what the last step runs as one with, if that stands behind the body."""
    found = find(body, types)
    for at, node in enumerate(body.nodes):
        here = (*path, (node.name, False))
        fused = found.get(at) or (tail if at == len(body.nodes) - 1 else None)
        if node.calls:
            yield here, node, fused
        for label, inner in node.bodies.items():
            inside = (*here, (label, node.kind == "repeat")) if label else here
            yield from _walk(inner, types, inside, fused if node.kind == "block" else None)
