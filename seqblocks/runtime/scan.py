"""The modules of a scan, whose orders share all parameters, none, or some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.combinators.scan import places_by_key
from seqblocks.errors import Fault, RunError
from seqblocks.graph import Named, ScanNode, is_ordered
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call, Grid, Size
from seqblocks.runtime.modules import Place, StepModule, call_child, gridded, makes
from seqblocks.runtime.parallel import merged
from seqblocks.runtime.shared_parameters import Holder
from seqblocks.state import States


@makes(ScanNode)
def _scan(node: ScanNode, place: Place) -> StepModule:
    if not (node.directions and node.owned):
        return Scan(node, place)
    inside = {item.name for item in graph.parameters(node.bodies[""])}
    return SeparateScan(node, place) if node.owned == inside else PartlySharedScan(node, place)


class Scan(Body):
    """Run the steps in another order, or in several orders that share all parameters, and merge the results."""

    def __init__(self, node: ScanNode, place: Place) -> None:
        super().__init__(node.bodies[""], place, node.verb)
        self._describe(node, place)

    def _describe(self, node: ScanNode, place: Place) -> None:
        self._orders: tuple[str, ...] = node.arguments.orders
        self._gridded = gridded(node, place)
        self._merge: str = node.arguments.merge
        self._key: str | None = node.arguments.key
        first = place.types[node.reads[0]]
        self._sequences = [is_ordered(place.types[value], first, node) for value in node.reads]
        ordered = (value for value, seq in zip(node.reads, self._sequences, strict=True) if seq)
        self._sources = frozenset(place.sources[value] for value in ordered if value in place.sources)
        self._in_place = graph.is_reversible(node.bodies[""])

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        results: list[Tensor] = []
        states: States = {}
        if call.phase == "context":
            return super()._compute(*tensors, call=call)
        for order in self._orders:
            inner, ordered = self._in_order(order, tensors, call)
            y, states = self._one(order, ordered, inner)
            results.append(self._restored(order, y, call))
        return merged(results, self._merge), states

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        """Run the steps on tensors that are already in the given order."""
        return super()._compute(*tensors, call=call)

    def _in_order(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Call, tuple[Tensor, ...]]:
        """Return the call and the tensors in an order. Steps that support reverse order need no flipped copies."""
        if order.startswith("columns"):
            rows, columns = self._grid_of(tensors[0], call)
            tensors = self._each(tensors, lambda x: _transposed(x, rows, columns))
            call = replace(call, grid=_turned(call.grid, (columns, rows), self._sources))
        if order.startswith("sorted"):
            places = self._places(tensors[0], call)
            tensors = self._each(tensors, lambda x: x[:, places])
            call = replace(call, grid=Grid(None))
        if not order.endswith("reverse"):
            return call, tensors
        resets = _reversed_resets(call.resets, call.relay.next_begins if call.relay else None)
        call = replace(call, relay=call.relay.reversed()) if call.relay else call
        if self._in_place:
            return replace(call, reverse=True, resets=resets), tensors
        resets = None if resets is None else resets.flip(1)
        return replace(call, resets=resets), self._each(tensors, lambda x: x.flip(1))

    def _restored(self, order: str, y: Tensor, call: Call) -> Tensor:
        """Return an output, restored to the order of the input."""
        if order.endswith("reverse") and not self._in_place:
            y = y.flip(1)
        if order.startswith("columns"):
            rows, columns = self._grid_of(y, call)
            y = _transposed(y, columns, rows)
        if order.startswith("sorted"):
            y = y[:, self._places(y, call).argsort()]
        return y

    def _places(self, x: Tensor, call: Call) -> Tensor:
        """Return the places of the tokens in the order of the key. Raises RunError if it has no finite values."""
        assert self._key is not None
        size = self._grid_of(x, call)
        try:
            return torch.tensor(places_by_key(self._key, size), device=x.device)
        except Fault as fault:
            raise RunError(f"the key {self._key} of {size[0]} rows and {size[1]} columns: {fault.message}") from None

    def _grid_of(self, x: Tensor, call: Call) -> tuple[int, int]:
        if call.grid:
            call.grid.step = self._gridded
        return call.grid_of(x)

    def _each(self, tensors: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return tuple(change(x) if seq else x for x, seq in zip(tensors, self._sequences, strict=True))

    def extra_repr(self) -> str:
        many = f", merge={self._merge}" if len(self._orders) > 1 else ""
        return f"order={'+'.join(self._orders)}{many}"


class SeparateScan(Scan):
    """Run several orders that share no parameters, each as a child with all steps."""

    def __init__(self, node: ScanNode, place: Place) -> None:
        StepModule.__init__(self)
        self._label = node.verb
        for name in node.directions:
            self._modules[name] = Body(node.bodies[""], place.inside(name), "steps")
        self._describe(node, place)

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        name = graph.direction_name(order)
        return call_child(self._modules[name], tensors, call, name)


class PartlySharedScan(Scan):
    """Run several orders that share some parameters. A child named after each order holds its own parameters."""

    def __init__(self, node: ScanNode, place: Place) -> None:
        own = _directed(node)
        own_names = {graph.join(place.path, name) for name in own}
        super().__init__(node, place._replace(held_elsewhere=place.held_elsewhere | own_names))
        for name in node.directions:
            self._modules[name] = _holder(own, place.inside(name))
        steps = sorted({name.rpartition(".")[0] for name in own})
        self._steps = {graph.join(place.path, step): step for step in steps}

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        own = self.get_submodule(graph.direction_name(order))
        directed: dict[str, Any] = {path: own.get_submodule(step) for path, step in self._steps.items()}
        return super()._one(order, tensors, replace(call, directed=directed))


def _directed(node: ScanNode) -> dict[str, Named]:
    """Return the parameters that each direction of a scan has of its own, by their names in its steps."""
    inside = list(graph.parameters(node.bodies[""], shared=True))
    names = set(graph.directed(node, inside))
    return {item.name: item for item in inside if item.name in names}


def _holder(parameters: dict[str, Named], place: Place) -> Holder:
    """Build the module that holds the parameters of one direction of a scan, under the names of their steps."""
    root = Holder()
    for name, item in parameters.items():
        module: nn.Module = root
        *steps, leaf = name.split(".")
        for step in steps:
            module = module._modules.setdefault(step, Holder())  # type: ignore[assignment]
        if graph.join(place.path, name) not in place.held_elsewhere:
            own = nn.Parameter(torch.empty(item.parameter.shape), item.parameter.trained)
            module.register_parameter(leaf, own)
    return root


def _reversed_resets(resets: Tensor | None, next_begins: Tensor | None) -> Tensor | None:
    """Return the resets of a scan from the right, which are true at t if a sequence begins at t + 1.

    next_begins [batch]: whether a sequence begins after the last token; None means no.
    """
    if resets is None:
        return None
    last = torch.zeros_like(resets[:, :1]) if next_begins is None else next_begins.unsqueeze(1)[:, : resets.shape[1]]
    return torch.cat([resets[:, 1:], last], 1)


def _turned(grid: Grid | None, size: Size, sources: frozenset[int]) -> Grid:
    """Return the grids for the steps of a scan over columns: those of the tokens that it reorders are transposed."""
    sizes = grid.sizes if grid else {}
    return Grid(size, sizes={value: (n, m) if value in sources else (m, n) for value, (m, n) in sizes.items()})


def _transposed(x: Tensor, rows: int, columns: int) -> Tensor:
    """Reorder the tokens of a grid from row-major to column-major order."""
    pattern = "batch (rows columns) features -> batch (columns rows) features"
    return rearrange(x, pattern, rows=rows, columns=columns)
