"""One token of a stream under torch.compile: a plan's function that reads weights instead of preparing them.

A compiler traces every Python call that leads to an operation and guards every attribute read there, which took longer
than compiling the operations themselves. Tracing a plan's function avoids this. Values derived from parameters are
computed in the graph, since compiled code continues to run after the parameters have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from seqblocks.graph import ModelSpec, OpNode
from seqblocks.kernels import dispatch
from seqblocks.kernels.joined import Matrix
from seqblocks.op import Op
from seqblocks.runtime.body import Body
from seqblocks.runtime.cell import Cell
from seqblocks.runtime.modules import is_hooked
from seqblocks.runtime.primitive import Primitive, is_primitive, parameters_of
from seqblocks.runtime.torch_modules import PRIMITIVES
from seqblocks.state import States, compact
from seqblocks.streaming.plan import TokenPlan, plan_tokens
from seqblocks.streaming.source import Path
from seqblocks.streaming.writer import COMBINATORS, Names, PlanWriter, holders, is_own_matrix, is_plain, is_pointwise


class TracedWriter(PlanWriter):
    """Writes a function that reads parameters from their modules' dicts.

    can_run: not if it calls code of a user (a module, a primitive, a hook), which may break the graph: guards after a
    break do not lead back to `is_traceable`.
    """

    can_run = True
    takes_half = False

    def child(self, parent: nn.Module, name: str) -> nn.Module:
        self.source.add(f"id({self.source.constant(parent._modules)}[{name!r}])")  # a compiler guards what it reads
        child = super().child(parent, name)
        self.can_run = self.can_run and not _runs_code_of_users(child)
        return child

    def _note_evaluation(self, module: nn.Module) -> None:
        """Leave the token to the modules once a step is in training mode. A compiler guards the mode that is read."""
        self.source.add(f"if {self.source.constant(module.__dict__)}['training']: return None")

    def write_product(self, module: nn.Module, found: list[tuple[OpNode, Matrix]], values: Names, path: Path) -> Names:
        """Compute them one after another, as concatenating the matrices would copy them for each token.

        Their outputs are concatenated instead, which copies nothing in compiled code. A compiler calls a library for
        each product, and steps between these calls would become several kernels instead of one.
        """
        nodes = [node for node, _ in found]
        inputs = [values[value] for value in nodes[0].reads]
        products = [self.node(self.child(module, node.name), node, inputs, (*path, node.name)) for node in nodes]
        whole = self.source.assign(f"cat(({', '.join(products)}), -1)")
        parts = self.source.split(whole, tuple(node.type.features for node in nodes if node.type))
        return {node.outputs[0]: part for node, part in zip(nodes, parts, strict=True)}

    def _matrix(self, module: nn.Module, node: OpNode) -> Matrix | None:
        step = module._modules[node.name]
        if not is_plain(step, node):
            return None
        assert is_primitive(step)
        parameters = parameters_of(step, self.call)
        found = step.op.matrix(parameters) if is_own_matrix(step.op, parameters) else None
        return Matrix(*found) if found else None

    def _with_maps(self, *_: Any) -> Iterator[Any]:
        return iter(())  # it would copy their weights

    def parameter(self, module: Cell, name: str) -> str:
        self._note_parameters(module, derived=False)
        table, key = holders(module)[name]
        return f"{self.source.constant(table)}[{key!r}]"

    def _op(self, module: Primitive, node: OpNode, inputs: Sequence[str], path: Path) -> str | None:
        op, source = module.op, self.source
        prepared = type(op).prepare_token is not Op.prepare_token
        prepared = prepared and op.prepare_token(parameters_of(module, self.call)) is not None
        if not (prepared or is_pointwise(op) or is_own_matrix(op, parameters_of(module, self.call))):
            return None
        self._note_parameters(module, derived=False)
        tables = ((name, source.constant(table), key) for name, (table, key) in holders(module).items())
        parameters = "{" + ", ".join(f"{name!r}: {table}[{key!r}]" for name, table, key in tables) + "}"
        given, own = source.at_ports(node, inputs), f"{source.constant(module.__dict__)}['op']"  # it may be replaced
        if prepared:
            run = source.assign(f"{own}.prepare_token({parameters})")
            y = source.call(run, given, path, [*node.state])
            source.replace_state(path, [*node.state], compact)
            return y
        call = source.constant(self.call)
        return source.assign(f"{own}.forward({parameters}, {call}, {', '.join(given)})")


class Traceable(Protocol):
    """The interface of a model that a traced plan uses."""

    spec: ModelSpec
    declared_state: States
    has_experts: bool
    traced_plan: TokenPlan | None


def is_traceable(model: Traceable) -> bool:
    """Return whether a compiled step of this model can use a plan, which is then `model.traced_plan`."""
    if nn.modules.module._has_any_global_hook() or torch.compiler.is_exporting() or dispatch.transformed():
        return False
    if model.has_experts:  # they break the graph
        return False
    if model.traced_plan is None or not model.traced_plan.holds():
        model.traced_plan = plan_tokens(model, model.spec, model.declared_state, kind=TracedWriter)  # type: ignore[arg-type]
    return model.traced_plan is not None


def _runs_code_of_users(module: nn.Module) -> bool:
    if isinstance(module, Primitive) and not module.op.builtin:
        return True
    own = {*PRIMITIVES, nn.Linear, *COMBINATORS, Body}  # Body: a layer of `repeat`
    return is_hooked(module) or type(module) not in own
