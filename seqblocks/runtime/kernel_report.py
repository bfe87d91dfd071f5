"""Determine which kernel implementation each step would use, and why, for any device. The device is not needed.

The same for products with matrices: which of torch's and oneDNN's a step uses, by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch

import seqblocks.kernels  # noqa: F401  - its ops register themselves
from seqblocks.graph import BlockNode, ExpertsNode, Graph, ModelSpec, Node, OpNode, RepeatNode
from seqblocks.graph.names import count
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch import Verdict
from seqblocks.kernels.half import fbgemm_max_tokens
from seqblocks.kernels.products import by_tokens
from seqblocks.roles import calls
from seqblocks.runtime.fusion import Fused, find
from seqblocks.types import Wire


def common_pattern(names: Sequence[str]) -> str:
    """Return one path for all names, with `*` where they differ."""
    rows = [name.split(".") for name in names]
    return ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*rows, strict=True))


@dataclass(slots=True)
class KernelUse:
    """A step that uses a kernel. `names` are its paths, several if layers of a repeat use the same kernel.

    `implementation` is the one that would run, or None if the requested one cannot.
    """

    names: list[str]
    verb: str
    kernel: str
    implementation: str | None
    verdicts: list[Verdict]
    tiles: dict[str, dict[str, int]]

    def reasons(self) -> list[str]:
        """Return why the implementations preferred by `auto` are not used."""
        preferred = takewhile(lambda verdict: verdict.implementation != self.implementation, self.verdicts)
        return [f"{verdict.implementation}: {verdict.reason}" for verdict in preferred if not verdict.can]

    def as_data(self) -> dict[str, Any]:
        out = {key: getattr(self, key) for key in ("names", "verb", "kernel", "implementation", "tiles")}
        return out | {"implementations": [verdict._asdict() for verdict in self.verdicts]}


def kernel_of(node: Node) -> tuple[str, dict[str, Any]] | None:
    """Return the kernel that a step calls, and the options that determine its implementation, or None."""
    return calls(node.op, node.wires) if node.op and node.type else None


def kernel_uses(
    model: ModelSpec, device: str, dtype: torch.dtype, arch: str, backend: str | None = None
) -> list[KernelUse]:
    """Return the steps of a model that use a kernel, in order, with equal ones merged. May raise BackendError."""
    backend = dispatch.requested(backend)
    found: dict[Any, KernelUse] = {}
    for path, node, fused in _walk(model.graph, model.types, ()):
        kernel, facts = kernel_of(node) or ("", {})
        facts = facts | (fused.facts() if fused else {})
        others = fused.nodes[1:] if fused else []
        name = " + ".join([".".join(label for label, _ in path), *(other.name for other in others)])
        key = (tuple(label for label, is_layer in path if not is_layer), kernel, *sorted(facts.items()))
        if key in found:
            found[key].names.append(name)
            continue
        verdicts = dispatch.why(kernel, device=device, dtype=dtype, arch=arch, **facts)
        able = (v.implementation for v in verdicts if v.can and backend in ("auto", v.implementation))
        chosen = next(able, None)
        tiles = dispatch.implementation(kernel, chosen).tiles(arch, dtype=dtype, **facts) if chosen else {}
        found[key] = KernelUse([name], node.verb, kernel, chosen, verdicts, tiles)
    return [*found.values()]


class ProductUse(NamedTuple):
    """A step that multiplies by a matrix. `names` are its paths, several if layers of a repeat are alike.

    products: (from this number of tokens on, the product), as of `products.by_tokens`. fbgemm_max_tokens: up to how
    many tokens of a stream FBGEMM is used instead, 0 for none.
    """

    names: list[str]
    rows: int
    columns: int
    products: list[tuple[int, str]]
    fbgemm_max_tokens: int

    def as_data(self) -> dict[str, Any]:
        by_tokens = [{"from_tokens": tokens, "product": name} for tokens, name in self.products]
        return self._asdict() | {"products": by_tokens}


def product_uses(model: ModelSpec, device: str, dtype: torch.dtype) -> list[ProductUse]:
    """Return the steps of a model that multiply by large matrices, in order, with equal ones merged.

    Each matrix counts by itself. A stream may join small ones with the same input, and a training step may split one.
    """
    found: dict[Any, ProductUse] = {}
    size = count(model.graph) * dtype.itemsize
    for path, node, _ in _walk(model.graph, model.types, (), with_all=True):
        for parameter in node.op.matrix_names if node.macs else ():  # an embedding only selects rows
            labels = (*path, (parameter, False)) if parameter != "weight" else path
            rows, columns = node.parameters[parameter].shape
            key = (tuple(label for label, is_layer in labels if not is_layer), rows, columns)
            name = ".".join(label for label, _ in labels)
            if key in found:
                found[key].names.append(name)
            else:
                few = fbgemm_max_tokens(rows * columns, dtype, size) if device == "cpu" else 0
                found[key] = ProductUse([name], rows, columns, by_tokens(rows, columns, device, dtype), few)
    return [*found.values()]


Path = tuple[tuple[str, bool], ...]  # labels, and for each whether it is the index of a repeat's layer


def _walk(
    body: Graph, types: dict[int, Wire | None], path: Path, following: Fused | None = None, with_all: bool = False
) -> Iterator[tuple[Path, OpNode, Fused | None]]:
    """Yield the nodes that use a kernel, or all with an op. following: the steps fused with the body's last step."""
    found = find(body, types)
    for at, node in enumerate(body.nodes):
        own_path = (*path, (node.name, False))
        fused = found.get(at) or (following if at == len(body.nodes) - 1 else None)
        if isinstance(node, OpNode) and (with_all or kernel_of(node)):
            yield own_path, node, fused
        for label, inner in node.bodies.items():
            inside = (*own_path, (label, isinstance(node, RepeatNode | ExpertsNode))) if label else own_path
            yield from _walk(inner, types, inside, fused if isinstance(node, BlockNode) else None, with_all)
