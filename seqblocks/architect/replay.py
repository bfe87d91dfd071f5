"""A training step of a model on a `Tape`, in the order in which the modules of `seqblocks/runtime` run it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.steps.combinators.cell import Stages, stages_of
from seqblocks.cost import BYTES
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.language import linear_forms
from seqblocks.language.keys import namespace_of
from seqblocks.op import Op
from seqblocks.ops.calc import Calc, applied, computed, program_of, recorded
from seqblocks.ops.dropout import drop_samples_memory
from seqblocks.ops.embed import Unembed
from seqblocks.ops.linear import Affine
from seqblocks.roles import joins_tokens, may_be_matrix
from seqblocks.tape import Shape, Tape, Value
from seqblocks.types import Rate, Wire, size_of
from seqblocks.workspace import associative_scan

SPLIT_MIN_ELEMENTS = 1 << 19  # elements: larger outputs of maps that are split are one product for each part
ID = 8  # bytes of a token id
LOOP_MAX_STEPS = 8  # steps of a loop that are replayed: each stands for several tokens
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}  # of each parameter, by optimiser


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
        self.tape = Tape(self.item)
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
                size = BYTES["float32"] if item.parameter.full_precision else self.item
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
            self.moments += [tape.new(value.shape, value.item, "optimizer") for _ in range(MOMENTS[optimizer])]
            if optimizer == "adamw":
                self.moments.append(tape.new((), 4, "optimizer"))  # the number of steps
        tape.step = ""
        outputs = self.forward()
        reads_ids = any(wire.kind == "tokens" for wire in (self.spec.input, *self.spec.inputs.values()))
        loss = loss_of(tape, outputs, reads_ids)
        self.kept_at = len(tape.events)
        tape.backward(loss)
        if optimizer == "adamw":
            update_by_adamw(tape)

    def given(self, wire: Wire) -> Value:
        """Return an input of the model, whose memory is not counted."""
        value = self.tape.new((0,))
        value.shape, value.item = self.sizes.shape(wire), ID if wire.kind == "tokens" else self.item
        return value

    def forward(self) -> dict[str, Value]:
        """Run all steps. Returns the outputs by name."""
        wires = list(self.spec.inputs.values()) or [self.spec.input]
        values = {value: self.given(wire) for value, wire in zip(self.spec.graph.reads, wires, strict=True)}
        out = self.body(self.spec.graph, values, ("",))
        return out if isinstance(out, dict) else {"": out}

    # --- bodies ---------------------------------------------------------------------------------------------------

    def body(self, body: Graph, values: dict[int, Value], paths: tuple[str, ...]) -> Any:
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

    def node(self, node: Node, inputs: list[Value], paths: tuple[str, ...]) -> Any:
        outer, self.tape.step = self.tape.step, paths[-1]
        y = getattr(self, f"_{node.kind}")(node, inputs, paths)
        self.tape.step = outer
        return y

    def _inside(self, body: Graph, inputs: Sequence[Value], paths: tuple[str, ...]) -> Value:
        found: Value = self.body(body, dict(zip(body.reads, inputs, strict=True)), paths)
        return found

    def _block(self, node: graph.BlockNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        return self._inside(node.bodies[""], inputs, paths)

    def _residual(self, node: graph.ResidualNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        y = self._inside(node.bodies[""], inputs, paths)
        if node.arguments.drop_path:
            y = drop_samples_memory(self.tape, y)
        self.tape.step = paths[-1]
        return self.tape.add(inputs[0], y)

    def _repeat(self, node: graph.RepeatNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
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
        self, body: Graph, inputs: Sequence[Value], paths: tuple[str, ...], inside: bool
    ) -> tuple[Value, dict[int, Value]]:
        """Return the output of a layer, and the values that later layers or steps read.

        inside: whether it is in one that is recomputed as a whole, also while the backward pass does so.
        """
        outer, self.inside_layer = self.inside_layer, inside
        y = self._inside(body, inputs, paths)
        self.inside_layer = outer
        exports, self.exports = self.exports, {}
        return y, exports

    def _parallel(self, node: graph.ParallelNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        values, results = dict(zip(node.reads, inputs, strict=True)), list[Value]()
        exports: dict[int, Value] = {}
        for label, body in node.bodies.items():
            given = [inputs[0], *(values[value] for value in body.captures)]
            y = self._inside(body, given, tuple(graph.join(path, label) for path in paths))
            results.append(y)
            exports |= self.exports
        self.exports = exports
        self.tape.step = paths[-1]
        axis = node.type.feature_axis if node.type and len(results) > 1 else -1
        return merged(self.tape, results, node.arguments.merge, axis)

    def _scan(self, node: graph.ScanNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        (body,), results = node.bodies.values(), list[Value]()
        in_place = graph.is_reversible(body)
        for order in node.arguments.orders:
            tensors = list(inputs)
            moved = graph.moves_tokens(order) + (order.endswith("reverse") and not in_place)
            for _ in range(moved):
                tensors = [self.tape.copy(x) if self._is_ordered(value, node) else x
                           for x, value in zip(tensors, node.reads, strict=True)]
            below = tuple(p for path in paths for p in (path, graph.join(path, graph.direction_name(order))))
            y = self._inside(body, tensors, below if node.directions else paths)
            self.tape.step = paths[-1]
            for _ in range(moved):
                y = self.tape.copy(y)
            results.append(y)
        return merged(self.tape, results, node.arguments.merge)

    def _is_ordered(self, value: int, node: graph.ScanNode) -> bool:
        return graph.is_ordered(self.spec.types[value], self.spec.types[node.reads[0]], node)

    def _each(self, node: graph.EachNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        """Run the steps on all sequences at once, which are copies where their numbers do not lie in this order."""
        tape, (first, *others), (body,), outer = self.tape, inputs, node.bodies.values(), self.sizes
        before, after = _axes(node, first.shape)
        count = math.prod(size for name, size in before if name in ("batch", "lanes", "lanes_2"))
        padded = math.prod(size for name, size in before if name not in ("batch", "features"))
        is_padded = node.arguments.pad and padded > first.shape[1]
        shifted = node.arguments.shift > 0 and any(name.startswith("lanes") and size > 1 for name, size in before)
        wire = self.spec.types[body.input]
        assert wire

        def cut(x: Value, axes: tuple[Axes, Axes], inside: Wire) -> Value:
            x = _resized(tape, x, (x.shape[0], padded, x.shape[2])) if is_padded else x
            x = _rolled(tape, x) if shifted else x
            return _reordered(tape, x, *axes, (count, *self.sizes.shape(inside)[1:]))

        given = [cut(first, (before, after), wire)]
        whole = node.reads_whole(self.spec.types)
        for x, number, is_whole in zip(others, body.ports.values(), whole, strict=True):
            inside = self.spec.types[number]
            assert inside
            if is_whole:
                given.append(tape.copy(tape.expand(x, (count, *x.shape[1:]))))
            else:
                given.append(cut(x, _axes(node, x.shape), inside))
        self.sizes = Sizes(count, self.sizes.length)
        y = self._inside(body, given, paths)
        self.sizes, tape.step = outer, paths[-1]
        if len(y.shape) == 2:
            return tape.view(y, self.sizes.shape(node.type) if node.type else y.shape)
        width = {"features": y.shape[-1], "seq": y.shape[1]}
        after, before = ([(name, width.get(name, size)) for name, size in axes] for axes in (after, before))
        shape = self.sizes.shape(node.type) if node.type else y.shape
        y = _reordered(tape, y, after, before, (shape[0], padded, shape[2]) if is_padded else shape)
        y = _rolled(tape, y) if shifted else y
        return _resized(tape, y, shape) if is_padded else y

    def _choose(self, node: graph.ChooseNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        """Run the steps on the chosen tokens, as many as `top` says, or on all tokens."""
        tape, (x, by, *others), body, outer = self.tape, inputs, node.bodies[""], self.sizes
        batch, tokens, features = x.shape
        count, rate = node.arguments.count(tokens), node.type.rate if node.type else 1
        order, sorted_scores = tape.new((batch, tokens), ID), tape.new((batch, tokens), by.item)
        places = tape.new((batch, count), ID)
        del order, sorted_scores
        whole = (False, *node.reads_whole(self.spec.types))
        flat = [each if is_whole else tape.view(each, (batch * tokens, *each.shape[2:]))
                for each, is_whole in zip((x, *others), whole, strict=True)]
        given = []
        for each, is_whole in zip(flat, whole, strict=True):
            if not is_whole:
                part = tape.new((batch * count, *each.shape[1:]), each.item)
                tape.function([each], [part], [places])
                each = tape.view(part, (batch, count, *part.shape[1:]))
                del part
            given.append(each)
        self.sizes = Sizes(batch, count * rate)
        y = self._inside(body, given, paths)
        self.sizes, tape.step = outer, paths[-1]
        y = tape.view(tape.cast(y, x.item), (batch * count, features))
        made = tape.new((batch * tokens, features), x.item)
        tape.function([flat[0], y], [made], [places])
        return tape.view(made, x.shape)

    def _experts(self, node: graph.ExpertsNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        """Run the router and the experts, each on an equal share of the tokens."""
        tape, router = self.tape, node.bodies[""].nodes[0]
        x, values = inputs[0], dict(zip(node.reads, inputs, strict=True))
        names = tuple(graph.join(path, router.name) for path in paths)
        logits = self.node(router, [x], names)
        tokens, count, top = math.prod(x.shape[:-1]), node.arguments.count, node.arguments.top
        tape.step = paths[-1]
        correction = self._parameter("correction", names) if node.arguments.corrected else None
        weights, held = self._routed(tape.view(logits, (tokens, count)), node, correction)
        self.held += held  # the model keeps them for losses of the router
        order = tape.new((tokens * top,), ID)
        labels = [label for label in node.bodies if label not in ("", graph.SHARED)]
        captured = (values[value] for value in node.bodies[labels[0]].captures)
        sizes = [tokens * top // count + (at < tokens * top % count) for at in range(count)]
        if node.arguments.capacity is not None:
            most = math.ceil(node.arguments.capacity * tokens * top / count)
            sizes = [min(size, most) for size in sizes]
            sizes.append(tokens * top - sum(sizes))  # choices of experts that are full
        sent = [tape.split(self._sent(each, order, top), sizes, 0) for each in (x, *captured)]
        results = []
        for at, label in enumerate(labels):
            below = tuple(graph.join(path, label) for path in paths)
            given = [part[at] for part in sent]
            if len(x.shape) > 2:
                given = [tape.view(each, (1, *each.shape), dense=each.dense) for each in given]
            y = self._inside(node.bodies[label], given, below)
            results.append(tape.view(y, (sizes[at], y.shape[-1])))
            del given, y
        if len(sizes) > count:
            results.append(tape.new((sizes[count], results[0].shape[-1]), results[0].item))
        del sent
        tape.step = paths[-1]
        joined = tape.cat(results, 0)
        results.clear()
        y = tape.new(joined.shape, joined.item)
        tape.function([joined], [y], [order])
        item = y.item
        del joined
        weighted = tape.multiply(tape.view(y, (tokens, top, y.shape[-1])), tape.view(weights, (tokens, top, 1)))
        del weights, y
        found = tape.cast(tape.sum(weighted, (tokens, weighted.shape[-1])), item)
        del weighted
        found = tape.view(found, (*x.shape[:-1], found.shape[-1]))
        shared = node.bodies.get(graph.SHARED)
        if shared is None:
            return found
        given = [x, *(values[value] for value in shared.captures)]
        return tape.add(found, self._inside(shared, given, tuple(graph.join(path, graph.SHARED) for path in paths)))

    def _routed(self, logits: Value, node: graph.ExpertsNode, correction: Value | None) -> tuple[Value, list[Value]]:
        """Record the choice of experts. Returns the weights [tokens, top], and what the model holds after its call."""
        tape, (tokens, count) = self.tape, logits.shape
        scores = tape.unary(logits, ["output"])
        order, best = tape.new((tokens, count), ID), tape.new((tokens, count), scores.item)
        if correction is not None:  # it chooses, and its gradient is zeros
            chosen = tape.slice(order, (tokens, node.arguments.top))
            weights = tape.new(chosen.shape, scores.item)
            tape.function([scores], [weights], [chosen])
            weights = tape.add(weights, tape.sum(correction, ()))
        else:
            tape.function([scores], [best], [order])
            weights = tape.slice(best, (tokens, node.arguments.top))
        if node.arguments.normalizes:
            weights = tape.divide(weights, tape.sum(weights, (tokens, 1)))
        if node.arguments.factor != 1.0:
            weights = tape.unary(weights, ())
        return weights, [logits, scores, order]

    def _sent(self, x: Value, order: Value, top: int) -> Value:
        """Record copies of each token for each of its experts, sorted by expert."""
        tape, whole = self.tape, (math.prod(x.shape[:-1]) * top, x.shape[-1])
        copies, y = tape.new(whole, x.item), tape.new(whole, x.item)
        tape.function([x], [copies])
        tape.function([copies], [y], [order])
        return y

    def _cell(self, node: graph.CellNode, inputs: list[Value], paths: tuple[str, ...]) -> Value:
        """Run a cell in parts."""
        tape, body = self.tape, node.bodies[""]
        parts = stages_of(body, self.spec.types)
        batch, tokens = inputs[0].shape[:2]
        size = parts.chunk(tokens, node.arguments.chunk)
        states = self._starts_of(node, batch, paths)
        if size >= tokens:
            y, _ = self._part_of_cell(node, parts, inputs, states, paths)
            tape.step = paths[-1]
            return tape.cast(y, self.item) if self.item <= 2 else y
        results = []
        sizes = [min(size, tokens - at) for at in range(0, tokens, size)]
        divided = [tape.split(x, sizes, 1) if len(x.shape) == 3 else [x] * len(sizes) for x in inputs]
        for own in zip(*divided, strict=True):
            run = partial(self._part_of_cell, node, parts, [*own], states, paths)
            y, states = tape.layer(run, [*own, *states.values()])
            results.append(y)
            del own, run, y
        tape.step = paths[-1]
        y = tape.cat(results, 1)
        return tape.cast(y, self.item) if self.item <= 2 else y

    def _starts_of(self, node: graph.CellNode, batch: int, paths: tuple[str, ...]) -> dict[str, Value]:
        """Return the states [batch, features] of a cell before the first token."""
        tape, body, item, found = self.tape, node.bodies[""], max(self.item, 4), dict[str, Value]()
        for name, number in body.ports.items():
            wire = self.spec.types[number]
            assert wire
            learned = f"start_{name}" in node.parameters
            start = tape.cast(self._parameter(f"start_{name}", paths), item) if learned else tape.new((1,), item)
            found[name] = tape.expand(start, (batch, wire.features))
        return found

    def _part_of_cell(
        self, node: graph.CellNode, parts: Stages, inputs: list[Value], states: dict[str, Value],
        paths: tuple[str, ...],
    ) -> tuple[Value, dict[str, Value]]:
        """Run some tokens of a cell. Returns the output, and the states after them."""
        body, self.part = node.bodies[""], inputs[0].shape[1]
        values = dict(zip((body.input, *body.captures), inputs, strict=True))
        self._nodes(parts.before, values, paths)
        if parts.groups:
            after = self._scanned(body, parts, values, states, paths)
            self._nodes(parts.from_states, values, paths)
        else:
            after = self._looped(body, parts, values, states, paths)
            self._nodes(parts.after, values, paths)
        self.part = None
        return values[body.result], after

    def _looped(
        self, body: Graph, parts: Stages, values: dict[int, Value], states: dict[str, Value], paths: tuple[str, ...]
    ) -> dict[str, Value]:
        """Record the loop, and add what later steps read of it to the values. Returns the states after it."""
        tape, first = self.tape, values[body.input]
        batch, tokens = first.shape[:2]
        size = -(-tokens // LOOP_MAX_STEPS)
        sizes = [*(min(size, tokens - 1 - at) for at in range(0, tokens - 1, size)), 1]  # the last state is kept alone
        given = [tape.split(x, sizes, 1) if len(x.shape) == 3 else [x] * len(sizes)
                 for x in map(values.__getitem__, parts.into_loop)]
        kept: dict[int, list[Value]] = {value: [] for value in parts.out_of_loop}
        for at, count in enumerate(sizes):
            self.part = count
            own = {value: divided[at] for value, divided in zip(parts.into_loop, given, strict=True)}
            for name, state in states.items():
                width = state.shape[-1]
                own[body.ports[name]] = tape.expand(tape.view(state, (batch, 1, width)), (batch, count, width))
            self._nodes(parts.loop, own, paths)
            tape.step, new = paths[-1], dict[str, Value]()
            for name, state in states.items():
                after = tape.cast(own[body.carried[name]], state.item)
                new[name] = tape.view(after, state.shape) if count == 1 else tape.slice(after, state.shape)
            states = new
            for value, found in kept.items():
                found.append(own[value])
        self.part = tokens
        values |= {value: tape.cat(found, 1) for value, found in kept.items()}
        return states

    def _scanned(
        self, body: Graph, parts: Stages, values: dict[int, Value], before: dict[str, Value], paths: tuple[str, ...]
    ) -> dict[str, Value]:
        """Record the associative scan of states that are set by linear formulas. Returns those of the last token."""
        tape, tokens = self.tape, values[body.input].shape[1]
        forms: dict[int, Any] = {number: linear_forms.Form({name: 1.0}, None) for name, number in body.ports.items()}
        apply = partial(linear_forms.apply, partial(_in_formula, tape))
        for node in parts.loop:
            op, tape.step = node.op, graph.join(paths[-1], node.name)
            assert isinstance(op, Calc)
            given = {}
            for name, (value,) in node.inputs.items():
                x: Any = forms.get(value, values.get(value))
                given[name] = tape.view(x, (x.shape[0], 1, x.shape[1])) if value in node.vectors else x
            names = tuple(graph.join(path, node.name) for path in paths)
            given |= {name: self._parameter(namespace_of(name), names) for name in op.learned}
            forms[node.outputs[0]] = computed(program_of(op.formula), given, apply)
        tape.step = paths[-1]
        new = {name: forms.get(number, values.get(number)) for name, number in body.carried.items()}
        states: dict[str, Value] = {}
        for group in parts.groups or ():
            found = associative_scan.states(tape, [new[name] for name in group], group, before, tokens)
            states |= dict(zip(group, found, strict=True))
        for name, state in states.items():
            batch, _, width = state.shape
            earlier = [tape.view(before[name], (batch, 1, width)), tape.slice(state, (batch, tokens - 1, width))]
            values[body.ports[name]] = tape.cat(earlier, 1)
        values |= {number: states[name] for name, number in body.carried.items()}
        return {name: tape.slice(state, (state.shape[0], state.shape[2])) for name, state in states.items()}

    def _nodes(self, nodes: Sequence[Node], values: dict[int, Value], paths: tuple[str, ...]) -> None:
        """Run some steps of a body, and add their outputs to the values."""
        for node in nodes:
            y = self.node(node, [values[value] for value in node.reads], tuple(graph.join(p, node.name) for p in paths))
            if not isinstance(y, list):
                y = self.tape.split(y, node.split, -1) if node.split else [y]
            values.update(zip(node.outputs, y, strict=True))

    # --- primitives -----------------------------------------------------------------------------------------------

    def _op(self, node: graph.OpNode, inputs: list[Value], paths: tuple[str, ...]) -> Any:
        p = {name: self._parameter(name, paths) for name in node.parameters}
        inputs = self._at_ports(node, self._narrowed(node, inputs))
        self.tape.out = self.sizes.shape(node.type) if node.type else ()
        if self.part is not None:
            self.tape.out = (self.tape.out[0], self.part, *self.tape.out[2:])
        if type(node.op).memory is Op.memory:
            self.undeclared.add(node.verb)
        if node.split and self._is_costly_split(node, inputs):
            return self.tape.split_product(inputs[0], p["weight"], p.get("bias"), node.split)
        return node.op.memory(self.tape, p, *inputs)

    def _parameter(self, name: str, paths: tuple[str, ...]) -> Value:
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


def _in_formula(tape: Tape, name: str, *operands: Any) -> Any:
    """Record an operator or a function of a formula, or compute one of numbers."""
    if any(isinstance(each, Value) for each in operands):
        return recorded(tape, name, *operands)
    return applied(name, *operands)


Axes = list[tuple[str, int]]


def _axes(node: graph.EachNode, shape: Shape) -> tuple[Axes, Axes]:
    """Return the axes of the input of an `each`, in the order before and after its sequences are part of the batch."""
    arguments, wire, (batch, tokens, features) = node.arguments, node.wires[0], shape
    size, (rows, columns) = arguments.width, (wire.grid if wire else None) or (1, 1)
    b, f = ("batch", batch), ("features", features)
    if arguments.axis == "features":
        lanes, seq, some = ("lanes", features // size), ("seq", tokens), ("features", size)
        return [b, seq, lanes, some], [b, lanes, seq, some]
    if arguments.axis == "windows":
        down, across = arguments.tiles((rows, columns))
        lanes, p, others, q = ("lanes", down), ("p", size), ("lanes_2", across), ("q", size)
        return [b, lanes, p, others, q, f], [b, lanes, others, p, q, f]
    if arguments.axis in ("frames", "rows"):
        length = size if arguments.axis == "frames" else columns
        axes = [b, ("lanes", tokens // length), ("seq", length), f]
        return axes, axes
    count = size if arguments.axis == "places" else columns
    lanes, seq = ("lanes", count), ("seq", tokens // count)
    return [b, seq, lanes, f], [b, lanes, seq, f]


def _rolled(tape: Tape, x: Value) -> Value:
    """Record torch's `roll` along two axes: along the first, then along the second."""
    once = tape.new(x.shape, x.item)
    y = tape.new(x.shape, x.item)
    del once
    tape.function([x], [y], (), x.bytes)
    return y


def _resized(tape: Tape, x: Value, shape: Shape) -> Value:
    """Record a copy with more or fewer rows and columns, whose derivative is a copy too."""
    y = tape.new(shape, x.item)
    tape.function([x], [y], (), x.bytes)
    return y


def _reordered(tape: Tape, x: Value, before: Axes, after: Axes, shape: Shape) -> Value:
    """Record axes in another order and with another shape: a copy, unless only axes of size 1 change places."""
    before, after = ([axis for axis in axes if axis[1] > 1] for axes in (before, after))
    return tape.view(x if before == after else tape.copy(x), shape)


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


def loss_of(tape: Tape, outputs: dict[str, Value], reads_ids: bool) -> Value:
    """Return the sum of the losses of all outputs: cross-entropy of logits for token ids, else the mean square."""
    total = None
    while outputs:
        y = outputs.pop(next(iter(outputs)))
        loss = cross_entropy(tape, y) if reads_ids and len(y.shape) == 3 else mean_square(tape, y)
        del y
        total = loss if total is None else tape.add(total, loss)
    assert total is not None
    return total


def cross_entropy(tape: Tape, logits: Value) -> Value:
    logs = tape.unary(tape.view(logits, (math.prod(logits.shape[:-1]), logits.shape[-1])), ["output"])
    loss = tape.new((), logs.item)
    tape.function([logs], [loss], [logs])
    return loss


def mean_square(tape: Tape, y: Value) -> Value:
    """Record torch's mse_loss, whose result lies in memory as large as y, which was allocated before the mean.

    The mean of 16 bits is that of a copy in float32.
    """
    loss = tape.new(y.shape, y.item).again(())
    tape.passing(y.bytes + (4 * y.numbers if y.item < 4 else 0))
    tape.function([y], [loss], [y])
    return loss


def update_by_adamw(tape: Tape) -> None:
    """Update all parameters, one after the other (foreach=False). The denominator of the previous one lives on."""
    tape.phase, before = "optimizer", None
    for value in tape.parameters.values():
        tape.step = value.memory.step
        root = tape.new(value.shape, value.item)
        before = tape.new(value.shape, value.item)  # noqa: F841 - as torch's variable does
        del root
