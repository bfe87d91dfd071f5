"""A training step of a model on a `Tape`, in the order in which the modules of `seqblocks/runtime` run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks import tape as tapes
from seqblocks.architect.replay import losses
from seqblocks.cost import BYTES, item_bytes
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.op import Op
from seqblocks.ops.dropout import drop_samples_memory
from seqblocks.ops.embed import Unembed
from seqblocks.ops.linear import Affine
from seqblocks.roles import joins_tokens, may_be_matrix
from seqblocks.tape import Shape, Tape, Value
from seqblocks.types import Rate, Wire, size_of

SPLIT_MIN_ELEMENTS = 1 << 19  # elements: larger outputs of maps that are split are one product for each part
ID_BYTES = 8  # of a token id
Paths = tuple[str, ...]  # the names of a step: its own, and in a scan that of each order
Record = Callable[["Replay", Any, list[Value], Paths], Any]
RECORDS: dict[type[Node], Record] = {}  # by class of node: records it, and returns its output


def replays(kind: type[Node]) -> Callable[[Record], Record]:
    """Register the function that records a node of a class."""

    def register(record: Record) -> Record:
        RECORDS[kind] = record
        return record

    return register


class Sizes(NamedTuple):
    """The sizes of a call: sequences, and tokens of a sequence of open length."""

    batch: int
    length: Rate

    def shape(self, wire: Wire) -> Shape:
        return self.batch, *(size_of(axis, lambda name: self.length) for axis in wire.axes[1:])


class Replay:
    """The steps of a model, run on a tape."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, dtype: str, checkpoint: bool) -> None:
        self.spec, self.sizes, self.dtype, self.checkpoint = spec, sizes, dtype, checkpoint
        self.item = BYTES[dtype]
        self.tape = Tape(self.item, dtype in tapes.CONVERTED_KINDS)
        self.exact = graph.is_exact(spec.graph)
        self.undeclared: set[str] = set()
        self.moments: list[Value] = []
        self.held: list[Value] = []  # by the model, after its call
        self.kept_at = 0  # the number of events of the forward pass and the loss
        self.inside_layer = False
        self.part: int | None = None  # the tokens of a part of a cell
        self.exports: dict[int, Value] = {}  # of the body that was run last
        self._own_parameters()

    def _own_parameters(self) -> None:
        self.weights: dict[str, Value] = {}
        named = list(graph.parameters(self.spec.graph, shared=True))
        for item in named:
            if item.tied is None:
                self.tape.step = item.name.rpartition(".")[0]
                size = item_bytes("float32", self.dtype) if item.parameter.full_precision else self.item
                self.weights[item.name] = self.tape.parameter(
                    tuple(item.parameter.shape), size, item.parameter.trained
                )
        owners = {item.name: item.tied for item in named if item.tied is not None}
        for name in owners:
            owner, seen = name, set[str]()
            while owner in owners and owner not in seen:
                seen.add(owner)
                owner = owners[owner]
            self.weights[name] = self.weights[owner]
        self.tape.step = ""

    def train(self, optimizer: str) -> None:
        """Run a training step."""
        tape = self.tape
        for value in tape.parameters.values():
            tape.step = value.memory.step
            self.moments += [tape.new(value.shape, value.item, "optimizer") for _ in range(losses.MOMENTS[optimizer])]
            if optimizer == "adamw":
                self.moments.append(tape.new((), 4, "optimizer"))  # the number of steps
        tape.step = ""
        outputs = self.forward()
        reads_ids = any(wire.kind == "tokens" for wire in (self.spec.input, *self.spec.inputs.values()))
        loss = losses.loss_of(tape, outputs, reads_ids)
        self.kept_at = len(tape.events)
        tape.backward(loss)
        if optimizer == "adamw":
            losses.update_by_adamw(tape)

    def given(self, wire: Wire) -> Value:
        """Return an input of the model, whose memory is not counted."""
        value = self.tape.new((0,))
        value.shape, value.item = self.sizes.shape(wire), ID_BYTES if wire.kind == "tokens" else self.item
        return value

    def forward(self) -> dict[str, Value]:
        """Run all steps. Returns the outputs by name."""
        wires = list(self.spec.inputs.values()) or [self.spec.input]
        values = {value: self.given(wire) for value, wire in zip(self.spec.graph.reads, wires, strict=True)}
        out = self.body(self.spec.graph, values, ("",))
        return out if isinstance(out, dict) else {"": out}

    # --- bodies ---------------------------------------------------------------------------------------------------

    def body(self, body: Graph, values: dict[int, Value], paths: Paths) -> Any:
        spent = graph.spent_values(body, [node.reads for node in body.nodes])
        for at, node in enumerate(body.nodes):
            inputs = [values[value] for value in node.reads]
            y = self.node(node, inputs, tuple(graph.join(path, node.name) for path in paths))
            if isinstance(y, list):
                values.update(zip(node.outputs, y, strict=True))
            elif node.split:
                axis = node.type.feature_axis if node.type else -1
                values.update(zip(node.outputs, self.tape.split(y, node.split, axis), strict=True))
            else:
                values[node.outputs[0]] = y
            values.update(self._exported(node.exports))
            for value in spent[at]:
                values.pop(value, None)
        self.exports = {value: values[value] for value in body.exports}
        if body.outputs:
            return {name: values[value] for name, value in body.outputs.items()}
        return values[body.result]

    def _exported(self, exports: Mapping[int, int]) -> dict[int, Value]:
        """Return the exports of the node that was run last, by the numbers in the body around it."""
        found = {here: self.exports[inside] for here, inside in exports.items()}
        if exports:
            self.exports = {}
        return found

    def node(self, node: Node, inputs: list[Value], paths: Paths) -> Any:
        outer, self.tape.step = self.tape.step, paths[-1]
        y = RECORDS[type(node)](self, node, inputs, paths)
        self.tape.step = outer
        return y

    def inside(self, body: Graph, inputs: Sequence[Value], paths: Paths) -> Value:
        found: Value = self.body(body, dict(zip(body.reads, inputs, strict=True)), paths)
        return found

    def _block(self, node: graph.BlockNode, inputs: list[Value], paths: Paths) -> Value:
        return self.inside(node.bodies[""], inputs, paths)

    def _residual(self, node: graph.ResidualNode, inputs: list[Value], paths: Paths) -> Value:
        y = self.inside(node.bodies[""], inputs, paths)
        if node.arguments.drop_path:
            y = drop_samples_memory(self.tape, y)
        self.tape.step = paths[-1]
        return self.tape.add(inputs[0], y)

    def _repeat(self, node: graph.RepeatNode, inputs: list[Value], paths: Paths) -> Value:
        values, x = dict(zip(node.reads, inputs, strict=True)), inputs[0]
        recompute = self.checkpoint and not self.inside_layer
        spent = node.spent_after_layers()
        for at, (label, body) in enumerate(node.bodies.items()):
            given = [x, *(values[value] for value in body.captures)]
            below = tuple(graph.join(path, label) for path in paths)
            run = partial(self._layer, body, given, below, self.inside_layer or recompute)
            x, exports = self.tape.layer(run, given) if recompute else run()
            values |= exports
            del exports
            for value in spent[at]:
                values.pop(value, None)
        self.exports = {value: values[value] for value in node.exports}
        return x

    def _layer(
        self, body: Graph, inputs: Sequence[Value], paths: Paths, inside: bool
    ) -> tuple[Value, dict[int, Value]]:
        """Return the output of a layer, and the values that later layers or steps read.

        inside: whether it is in one that is recomputed as a whole, also while the backward pass does so.
        """
        outer, self.inside_layer = self.inside_layer, inside
        y = self.inside(body, inputs, paths)
        self.inside_layer = outer
        exports, self.exports = self.exports, {}
        return y, exports

    def _parallel(self, node: graph.ParallelNode, inputs: list[Value], paths: Paths) -> Value:
        values, results = dict(zip(node.reads, inputs, strict=True)), list[Value]()
        exports: dict[int, Value] = {}
        for label, body in node.bodies.items():
            given = [inputs[0], *(values[value] for value in body.captures)]
            y = self.inside(body, given, tuple(graph.join(path, label) for path in paths))
            results.append(y)
            exports |= self.exports
        self.exports = exports
        self.tape.step = paths[-1]
        axis = node.type.feature_axis if node.type and len(results) > 1 else -1
        return merged(self.tape, results, node.arguments.merge, axis)

    def _scan(self, node: graph.ScanNode, inputs: list[Value], paths: Paths) -> Value:
        (body,), results = node.bodies.values(), list[Value]()
        in_place = graph.is_reversible(body)
        for order in node.arguments.orders:
            tensors = list(inputs)
            moved = graph.moves_tokens(order) + (order.endswith("reverse") and not in_place)
            for _ in range(moved):
                tensors = [self.tape.copy(x) if self._is_ordered(value, node) else x
                           for x, value in zip(tensors, node.reads, strict=True)]
            below = tuple(p for path in paths for p in (path, graph.join(path, graph.direction_name(order))))
            y = self.inside(body, tensors, below if node.directions else paths)
            self.tape.step = paths[-1]
            for _ in range(moved):
                y = self.tape.copy(y)
            results.append(y)
        return merged(self.tape, results, node.arguments.merge)

    def _is_ordered(self, value: int, node: graph.ScanNode) -> bool:
        return graph.is_ordered(self.spec.types[value], self.spec.types[node.reads[0]], node)

    # --- primitives -----------------------------------------------------------------------------------------------

    def _op(self, node: graph.OpNode, inputs: list[Value], paths: Paths) -> Any:
        p = {name: self.parameter(name, paths) for name in node.parameters}
        inputs = self._at_ports(node, self._narrowed(node, inputs))
        self.tape.out = self.sizes.shape(node.type) if node.type else ()
        if self.part is not None:
            self.tape.out = (self.tape.out[0], self.part, *self.tape.out[2:])
        if type(node.op).memory is Op.memory:
            self.undeclared.add(node.verb)
        if node.split and self._is_costly_split(node, inputs):
            return self.tape.split_product(inputs[0], p["weight"], p.get("bias"), node.split)
        return node.op.memory(self.tape, p, *inputs)

    def parameter(self, name: str, paths: Paths) -> Value:
        found = (self.weights.get(graph.join(path, name)) for path in reversed(paths))
        return next(value for value in found if value is not None)

    def _narrowed(self, node: graph.OpNode, inputs: list[Value]) -> list[Value]:
        """Return the inputs in the dtype of a 16-bit model, which an op with parameters converts them to."""
        op = node.op
        plain = any(not parameter.full_precision for parameter in node.parameters.values())
        if not self.exact or op.mixed or not plain or self.item > 2:
            return inputs
        return [self.tape.copy(x, self.item) if x.item == BYTES["float32"] else x for x in inputs]

    def _at_ports(self, node: graph.OpNode, inputs: list[Value]) -> list[Any]:
        if node.vectors:
            longer = max((x for x in inputs), key=lambda x: len(x.shape))
            inputs = [self._at_tokens(x, longer) if value in node.vectors else x
                      for x, value in zip(inputs, node.at_ports, strict=True)]
        rest, found = iter(inputs), list[Any]()
        for port in node.op.ports:
            part = [next(rest) for _ in node.inputs.get(port.name, ())]
            axis = 1 if joins_tokens(node.op) or (part and len(part[0].shape) == 4) else -1
            found.append(None if not part else part[0] if len(part) == 1 else self.tape.cat(part, axis))
        return found

    def _at_tokens(self, x: Value, longer: Value) -> Value:
        """Return a vector [batch, features] at each token of a sequence, or place of an image."""
        batch, features = x.shape
        image = len(longer.shape) == 4
        shape = (batch, features, *longer.shape[2:]) if image else (batch, longer.shape[1], features)
        return self.tape.expand(x, shape)

    def _is_costly_split(self, node: graph.OpNode, inputs: list[Any]) -> bool:
        x = inputs[0]
        if self.item < 4 or not may_be_matrix(node.op) or not isinstance(node.op, Affine | Unembed):
            return False
        if node.type is None or node.type.feature_axis != -1:
            return False
        width, tokens = x.shape[-1], math.prod(x.shape[:-1])
        return tokens * sum(node.split) >= SPLIT_MIN_ELEMENTS and min(node.split) >= int(width)


def merged(tape: Tape, results: list[Value], how: str, axis: int = -1) -> Value:
    """Return the sum, mean, product or concat of results."""
    if len(results) == 1:
        return results[0]
    if how == "concat":
        return tape.cat(results, axis)
    total = results[0]
    for y in results[1:]:
        total = tape.multiply(total, y) if how == "product" else tape.add(total, y)
    return tape.unary(total, ()) if how == "mean" else total


RECORDS |= {
    graph.BlockNode: Replay._block, graph.ResidualNode: Replay._residual, graph.RepeatNode: Replay._repeat,
    graph.ParallelNode: Replay._parallel, graph.ScanNode: Replay._scan, graph.OpNode: Replay._op,
}  # fmt: skip
