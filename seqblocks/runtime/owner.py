"""A module that holds the parameters which its node declares, or reads them from the module that does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from seqblocks import graph
from seqblocks.errors import RunError
from seqblocks.graph import Node
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place
from seqblocks.runtime.shards import replicated
from seqblocks.runtime.shared_parameters import Holder, shared_parameters


class Owner(Holder):
    """Base of modules whose nodes declare parameters."""

    _reduction: str | None = None  # in a sharded model: how gradients of replicated parameters are reduced

    def _declare(self, node: Node, place: Place) -> None:
        """Register the parameters of a node, except those that another module holds."""
        self._path = place.path
        self._own, self._elsewhere = list(node.parameters), list[str]()
        if place.held_elsewhere:
            self._elsewhere = [name for name in self._own if graph.join(place.path, name) in place.held_elsewhere]
            self._own = [name for name in self._own if name not in self._elsewhere]
        for name in self._own:
            declared = node.parameters[name]
            self.register_parameter(name, nn.Parameter(torch.empty(declared.shape), declared.trained))

    def parameters_by_name(self, call: Call) -> dict[str, Any]:
        """Return the parameters, including those that another step or the current direction of a scan holds.

        They are read as attributes, since parametrizations, pruning and sharding replace registered parameters.
        """
        found: dict[str, Any] = {name: getattr(self, name) for name in self._own}
        if self._elsewhere:
            found |= self._held_elsewhere(call)
        if self._reduction:
            found = {name: replicated(x, self._reduction) for name, x in found.items()}
        return found

    def _held_elsewhere(self, call: Call) -> dict[str, Any]:
        found = shared_parameters(self)
        if call.directed and self._path in call.directed:
            holder = call.directed[self._path]
            found |= {name: getattr(holder, name) for name in self._elsewhere if hasattr(holder, name)}
            found |= shared_parameters(holder)
        if missing := next((name for name in self._elsewhere if name not in found), None):
            raise RunError(f"{self._path} has a {missing} for each direction of its scan: call the scan")
        return found


def reduce_gradients(step: Owner, how: str) -> None:
    """Let the gradients of a step's replicated parameters be reduced in this way over the ranks of a sharded model."""
    step._reduction = how
