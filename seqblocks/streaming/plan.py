"""One token of a stream, planned once and run many times.

In a small model, the computation of one token takes less time than the Python code that dispatches it. The first step
without gradients therefore makes a `TokenPlan`: one function that runs all steps of the model in order, with parameters
already in the layout that one token needs, and checks the state. Its source is generated from the graph; the only user
input in it is quoted names. Ops may provide a function of tokens (`Op.prepare_token`); otherwise their `forward`
runs. A plan is valid while modules, hooks and parameters are unchanged. Changes through `parameter.data` cannot be
detected, so values derived from parameters are computed again for each stream and after each step of an optimiser
(`renewed`). A plan does not change once it is made, since several threads may run it: computing its values again
makes another one. Nothing in a plan refers to the plan or its model, so that a deleted model frees its memory at
once.

The writer of the source is `seqblocks/streaming/source.py`. Short prompts and frames are read by a second function,
made of the same calls: `seqblocks/streaming/frames.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.analysis.steps.combinators.cell import STARTED
from seqblocks.errors import UsageError
from seqblocks.graph import SHARED, Graph, ModelSpec, Node, begins, is_context
from seqblocks.kernels.half import may_copy
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.kernels.joined import COPY_MAX_ELEMENTS, Matrix, prepare_joined
from seqblocks.kernels.stored import StoredMatrix
from seqblocks.op import Op
from seqblocks.runtime.body import Block, Body
from seqblocks.runtime.call import Call, Grid, Phase
from seqblocks.runtime.cell import Cell
from seqblocks.runtime.experts import Experts, on_routed
from seqblocks.runtime.modules import call_child, is_hooked, take_exports
from seqblocks.runtime.parallel import Parallel, merged
from seqblocks.runtime.primitive import Primitive, checked, is_primitive, parameters_of, takes_plain_tokens
from seqblocks.runtime.repeat import Repeat
from seqblocks.runtime.residual import Residual
from seqblocks.runtime.scan import Scan
from seqblocks.runtime.shared_parameters import NONE
from seqblocks.runtime.torch_modules import PRIMITIVES, is_built
from seqblocks.state import States, dtype_of
from seqblocks.streaming.frames import Frames
from seqblocks.streaming.guard import Guard, Updates
from seqblocks.streaming.half import can_plan, half_dtype, keeps_cache, to_half, token_parameters
from seqblocks.streaming.joined_steps import in_turn, prepare_joined_steps
from seqblocks.streaming.maps import Reader, readers
from seqblocks.streaming.source import Path, PlanSource, Values
from seqblocks.streaming.together import Together
from seqblocks.streaming.token_rows import Reading, as_rows, as_sequences, has_tokens, read
from seqblocks.token_function import TokenFunction

POINTWISE = ("vector", "tokens")  # ports of these kinds accept a token without a time axis
DTYPES = (torch.float32, torch.float64)


def plan_tokens(
    model: Body, spec: ModelSpec, declared: States, stream: object = None, kind: type[TokenPlan] | None = None
) -> TokenPlan | None:
    """Return the plan of a model, or None if some step is not supported, or if parameters changed meanwhile.

    declared: the declared states of the steps, nested by name. stream: what identifies the model's latest stream. kind:
    the class of the plan, default TokenPlan.
    """
    parameters = list(model.parameters())
    if model.training or is_hooked(model) or any(x.is_inference() for x in parameters):
        return None
    stored = [*parameters, *(each.scale for each in model.modules() if isinstance(each, Int8Matrix))]
    kind, half, kinds = kind or TokenPlan, half_dtype(stored), {x.dtype for x in stored}
    is_uniform = kind.takes_half and can_plan(spec.graph) if half else len(kinds) == 1 and kinds <= {*DTYPES}
    if not is_uniform or {(type(x), x.device.type) for x in parameters} != {(nn.Parameter, "cpu")}:
        return None
    before = _as_they_are(parameters)
    made = kind(model, spec, declared, stream, half)
    if _as_they_are(model.parameters()) != before or (half and made.calls_modules):
        return None
    return made


class TokenPlan:
    """Run one token, x [batch, features] or token ids [batch], through a model.

    run(state, x) returns (y, state), or None if the state does not match its declaration.

    If the model changes the rate of its tokens, x is a frame [batch, frame, features] or ids [batch, frame], and y has
    the output tokens of that frame.
    """

    takes_half = True  # whether it computes models in 16 bits

    def __init__(
        self, model: Body, spec: ModelSpec, declared: States, stream: object, half: torch.dtype | None = None
    ) -> None:
        """half: the dtype of a model in 16 bits, None for others."""
        self._made_after = (Updates.latest, stream)  # the update and stream before which values were derived
        self._parameters = list(model.parameters())
        self._memory = [_memory(x) for x in self._parameters]
        self._half = half
        self.dtype = self._half or self._parameters[0].dtype
        self._types = spec.types
        self._frames = Frames(spec.graph, spec.types)
        of_tokens = spec.input.kind == "tokens"
        self._dtypes = (torch.int64, torch.int32) if of_tokens else (self.dtype,)
        frame = (self._frames.size,) if self._frames.have_several_tokens else ()
        self._sizes = frame + (() if of_tokens else (spec.input.features,))
        self._grid = Grid(spec.input.grid)
        self._phase: Phase = "stream" if begins(spec.graph) else None
        self._call = Call(False, None, True, None, False, True, self._grid, phase=self._phase)
        size = sum(x.numel() * x.element_size() for x in self._parameters)
        # Functions of tokens capture this one: one that referred to the plan would be a cycle.
        self._given = partial(token_parameters, call=self._call, copies=may_copy(size))
        self._guard = Guard()
        self._guard.note_owner(model)
        self._source = PlanSource(self.dtype)
        self._exports: dict[int, str] = {}  # variables of the values that bodies export, so far
        self._source.unpack(declared, ())
        if self._half and not of_tokens:
            self._source.add("x = x.float()")
        y = self._body(model, spec.graph, ["x", *self._context_inputs(spec.graph)], ())
        if not spec.graph.outputs:
            y = self._output({spec.graph.result: y}, spec.graph.result)
        compiled = self._source.function_of_frame if self._frames.have_several_tokens else self._source.function
        self._make_run = compiled(y, declared)
        self._make_reading = cache(partial(self._source.function_of_several, y, declared))  # few models read prompts
        self._set_values(self._source.values)
        self._guard.compile()
        self.holds = self._guard.holds  # returns whether the model is unchanged

    def _set_values(self, values: Values) -> None:
        self._values = values
        self.run: Callable[..., tuple[Tensor, States] | None] = self._make_run(values)
        self._reading: Reading | None = None

    def is_current(self, stream: object) -> bool:
        """Return whether values were derived from parameters in this stream and since the latest update."""
        return self._made_after == (Updates.latest, stream)

    def renewed(self, stream: object) -> TokenPlan | None:
        """Return a plan with all values derived from parameters again, or None if it has to be built instead."""
        made_after = (Updates.latest, stream)
        if [_memory(x) for x in self._parameters] != self._memory:
            return None
        values = self._source.prepared_again()
        if values is None:
            return None
        found = copy(self)
        found._made_after = made_after
        found._set_values(values)
        return found

    def read(self, state: States, x: Tensor) -> tuple[Any, States] | None:
        """Run several tokens, ids [batch, seq], and return (y [batch, 1, features] of the last token, state).

        Return None for many tokens, if a step makes anything other than tokens, or if the state does not match its
        declaration.
        """
        if not self._source.splits or not self._frames.is_short(x) or x.dtype not in self._dtypes:
            return None
        if self._reading is None:
            self._reading = self._make_reading()(self._values)
        return read(self._reading, state, x)

    @property
    def calls_modules(self) -> bool:
        """Return whether the function calls modules, such as replaced and hooked ones, or code of a user."""
        return self._source.calls_modules

    def takes(self, x: Tensor) -> bool:
        """Return whether x is a valid token for each sequence, so that no other check is needed."""
        return x.dtype in self._dtypes and x.shape[1:] == self._sizes and x.dim() > 0

    def suits(self, x: Tensor) -> bool:
        """Return whether the function is to run x: one frame, of so few sequences that modules would take longer."""
        frames = self._frames
        return x.shape[0] <= frames.most_batch and (not frames.have_several_tokens or x.shape[1] == frames.size)

    def _context_inputs(self, body: Graph) -> Iterator[str]:
        """Yield variables of the inputs that do not stream, 'None' for those that no step of the stream reads."""
        for name in body.ports:
            yield self._source.carry_over(("input", name)) if name in body.kept else "None"

    def _child(self, parent: nn.Module, name: str) -> nn.Module:
        child = parent._modules[name]
        assert child is not None
        self._guard.note_entry(parent._modules, name)
        return child

    # --- bodies and nodes: each returns the variable of its result ----------------------------------------------------

    def _body(self, module: nn.Module, body: Graph, inputs: Sequence[str], path: Path) -> str:
        values = dict(zip(body.reads, inputs, strict=True))
        for node in filter(is_context, body.nodes):
            values |= self._context_outputs(node, (*path, node.name))
        nodes = [node for node in body.nodes if not is_context(node)]
        with_maps = dict(self._with_maps(module, body, nodes))
        replaced = {node.outputs[0] for reader, _ in with_maps.values() for node in reader.maps}
        nodes = [node for node in nodes if node.outputs[0] not in replaced]
        matrix, joins = partial(self._matrix, module), partial(self._joins, module)
        together = Together(nodes, values, matrix, joins)
        for at, node in enumerate(nodes):
            if not self._frames.have_several_tokens and node.name == getattr(module, "_first_of_tail", None):
                later = {*body.results, *(value for other in nodes[at:] for value in other.reads)}
                self._source.continue_with_last(values[value] for value in later & values.keys())
            if node.outputs[0] in values:  # already computed in one product with an earlier step
                continue
            if found := with_maps.get(node.outputs[0]):
                made = self._reader(module, *found, values, path)
            else:
                made = self._with_others(module, node, together, values, path)
            made |= {here: self._exports[inside] for here, inside in node.exports.items()}
            values |= made
            together.note(made)
        self._exports |= {value: values[value] for value in body.exports}
        for name, value in body.carried.items():  # memory of its own: it may be the input, or a part of another value
            self._source.keep((*path, name), f"{values[value]}.clone()")
        return self._result(body, values)

    def _reader(
        self, module: nn.Module, reader: Reader, run: str, values: dict[int, str], path: Path
    ) -> dict[int, str]:
        """Call the function of a step that computes its inputs. Return the variable of its output by value."""
        node, inputs = reader.node, [values[value] for value in reader.sources]
        nodes = node, *reader.maps
        wholes = [self._of_sequences(module._modules[each.name], each) for each in nodes]
        several = self._frames.several(node, self._source.value(run), self._whole(reader.of_several, wholes))
        return {node.outputs[0]: self._source.call(run, inputs, (*path, node.name), [*node.state], several=several)}

    def _whole(self, join: Callable[[list[Any]], Any], functions: list[Any]) -> str:
        """Return the name of what `join` makes of functions of several tokens, or "" if one is None."""
        if None in functions:
            return ""
        return self._source.constant(join([each.several for each in functions]))

    def _with_others(
        self, module: nn.Module, node: Node, together: Together, values: dict[int, str], path: Path
    ) -> dict[int, str]:
        """Compute a node, and later ones if one call computes them too. Return the variables by value."""
        read = [values[value] for value in node.reads]
        if found := together.products.get(node.outputs[0]):
            return self._one_product(module, found, read, path)
        steps = together.joined(node)
        if len(steps) > 1:
            if made := self._joined_steps(module, steps, values, path):
                return made
            together.cannot_join(node)
        y = self._node(self._child(module, node.name), node, read, (*path, node.name))
        parts = self._source.split(y, node.split) if node.split else [y]
        return dict(zip(node.outputs if node.split else node.outputs[:1], parts, strict=True))

    def _at_ports(self, node: graph.OpNode, inputs: Sequence[str]) -> list[str]:
        """Return an argument for each port, with vectors repeated for each token of a frame."""
        if many := self._frames.vector_repeats(node):
            pairs = zip(node.reads, inputs, strict=True)
            inputs = [self._source.assign(f"{x}.repeat({many}, 1)") if v in node.vectors else x for v, x in pairs]
        return self._source.at_ports(node, inputs)

    def _result(self, body: Graph, values: dict[int, str]) -> str:
        if not body.outputs:
            return values[body.result]
        named = (f"{name!r}: {self._output(values, value)}" for name, value in body.outputs.items())
        return self._source.assign("{" + ", ".join(named) + "}")

    def _output(self, values: dict[int, str], value: int) -> str:
        """Return an expression for an output of the model."""
        wire = self._types[value]
        is_converted = self._half and not (wire and wire.kind == "tokens")  # token ids are whole numbers
        y = f"{values[value]}.to({self._source.constant(self._half)})" if is_converted else values[value]
        if not self._frames.have_several_tokens or not has_tokens(wire):
            return y
        return f"{self._source.constant(as_sequences)}({y}, batch).contiguous()"

    def _context_outputs(self, node: Node, path: Path) -> dict[int, str]:
        """Return the variables of a context step's outputs, 'None' unless the state holds them."""
        if not node.kept:
            return dict.fromkeys(node.made, "None")
        y = self._source.carry_over((*path, "output"))
        exports = dict.fromkeys(node.exports, "None")
        exports |= {value: self._source.carry_over((*path, part)) for part, value in node.kept_exports.items()}
        if not node.split:
            return {node.outputs[0]: y, **exports}
        assert node.type
        parts = self._source.split(y, node.split, node.type.feature_axis)
        return {**dict(zip(node.outputs, parts, strict=True)), **exports}

    def _one_product(
        self, module: nn.Module, found: list[tuple[graph.OpNode, Matrix]], inputs: Sequence[str], path: Path
    ) -> dict[int, str]:
        """Compute linear maps of the same input in one product. Return the variables of their outputs by value."""
        children, given = [(self._child(module, node.name), node) for node, _ in found], self._given
        for child, _ in children:
            assert is_primitive(child)
            self._guard.note_bypassed(child)
            self._note_parameters(child, derived=True)

        def prepare() -> TokenFunction | None:
            matrices = [_matrix(child, node, given) for child, node in children]
            return None if None in matrices else TokenFunction(prepare_joined([each for each in matrices if each]))

        run = self._source.prepared(prepare)
        assert run is not None
        y = self._source.call(run, self._at_ports(found[0][0], inputs), (), [])
        widths = tuple(matrix.weight.shape[0] for _, matrix in found)
        parts = self._source.split(y, widths)
        return {node.outputs[0]: part for (node, _), part in zip(found, parts, strict=True)}

    def _with_maps(self, module: nn.Module, body: Graph, nodes: list[Node]) -> Iterator[tuple[int, tuple[Reader, str]]]:
        """Yield the output of each step that computes its inputs, with the step and the variable of its function."""
        modules: dict[str, Any] = module._modules
        given = self._given

        def function(node: graph.OpNode) -> TokenFunction | None:
            return node.op.prepare_token(given(modules[node.name]))

        def is_simple(node: Node) -> bool:
            return not self._frames.vector_repeats(node) and is_plain(modules[node.name], node)

        for reader in readers(body, nodes, is_simple):
            made = reader.prepare(function)
            by_token = self._frames.runs(reader.node, made) and all(map(self._frames.is_rowwise, reader.maps))
            run = self._source.prepared(partial(reader.prepare, function), made) if by_token else None
            if run is None:
                continue
            for node in (reader.node, *reader.maps):
                child: Any = self._child(module, node.name)
                self._guard.note_bypassed(child)
                self._note_parameters(child, derived=True)
            yield reader.node.outputs[0], (reader, run)

    def _joined_steps(
        self, module: nn.Module, found: list[graph.OpNode], values: dict[int, str], path: Path
    ) -> dict[int, str] | None:
        """Compute steps of the same op, whose inputs are known, as one step if possible.

        Return the variables of their outputs by value.
        """
        first, op = found[0], found[0].op
        steps: list[Any] = [module._modules[node.name] for node in found]
        widths, given = [node.type.features for node in found if node.type], self._given

        def prepare() -> TokenFunction | None:
            return prepare_joined_steps(op, [given(step) for step in steps], widths)

        joined = prepare()
        run = self._source.prepared(prepare, joined) if self._frames.runs(first, joined) else None
        if joined is None or run is None:
            return None
        for node, step in zip(found, steps, strict=True):
            self._child(module, node.name)
            self._guard.note_bypassed(step)
            self._note_parameters(step, derived=True)
        inputs = [self._at_ports(node, [values[value] for value in node.reads]) for node in found]
        wholes = [self._of_sequences(*each) for each in zip(steps, found, strict=True)]
        several = self._frames.several(first, joined, self._whole(in_turn, wholes))
        made = self._source.call_joined(run, inputs, [(*path, node.name) for node in found], [*found[0].state], several)
        return {node.outputs[0]: y for node, y in zip(found, made, strict=True)}

    def _joins(self, module: nn.Module, node: graph.OpNode) -> Hashable | None:
        """Return what steps have in common that can run as one, None if a step cannot."""
        if len(node.inputs) < len(node.op.ports) or not is_plain(module._modules[node.name], node):
            return None
        return type(node.op), repr(node.op), frozenset(self._frames.tokens(node))

    def _matrix(self, module: nn.Module, node: graph.OpNode) -> Matrix | None:
        return _matrix(module._modules[node.name], node, self._given)

    def _note_parameters(self, module: Primitive | Cell, derived: bool) -> None:
        for table, name in holders(module).values():
            self._guard.note_entry(table, name)
            if derived:
                x = table[name]
                self._guard.note_numbers(x.values if isinstance(x, Int8Matrix) else x)

    def _node(self, module: nn.Module, node: Node, inputs: Sequence[str], path: Path) -> str:
        draws = getattr(module, "_draws", False)
        make = None if is_hooked(module) or (draws and module.training) else PLANNED.get(type(module))
        y = None if make is None else make(self, module, node, inputs, path)
        if y is not None:
            self._guard.note_bypassed(module)
            if draws:
                self._note_evaluation(module)
            return y
        timed = [has_tokens(self._types[value]) for value in node.reads]
        return self._call_module(module, node, timed, has_tokens(node.type), inputs, path, [*node.exports.values()])

    def _note_evaluation(self, module: nn.Module) -> None:
        self._guard.note_evaluation(module)

    def _call_module(
        self, module: nn.Module, node: Node | None, timed: list[bool], made: bool, inputs: Sequence[str], path: Path,
        exports: Sequence[int] = (),
    ) -> str:
        """Call a module with sequences of one token, or of several. exports: the values that later steps read."""
        for each in filter(is_hooked, module.modules()):
            self._guard.note_hooked(each)
        size, phase = self._grid.size, self._phase
        are_timed = [made, *(has_tokens(self._types[value]) for value in exports)]
        self._source.splits &= all(timed) and all(are_timed)
        numbers = {value: value for value in exports}

        def call(state: States | None, tensors: list[Tensor], shape: Callable[[Tensor], Tensor]) -> tuple[Any, States]:
            call = Call(False, state, True, None, False, True, Grid(size), phase=phase)  # steps may set the grid
            y, states = call_child(module, tensors, call, path[-1], node)
            more = take_exports(call, numbers, path[-1]).values() if numbers else ()
            results = [shape(x) if time and x is not None else x for x, time in zip((y, *more), are_timed, strict=True)]
            return results if numbers else results[0], states

        def run(state: States | None, *given: Tensor) -> tuple[Any, States]:
            tensors = [x.unsqueeze(1) if time else x for x, time in zip(given, timed, strict=True)]
            return call(state, tensors, lambda y: y.squeeze(1))

        def several(batch: int, state: States | None, *given: Tensor) -> tuple[Any, States]:
            tensors = [as_sequences(x, batch) if time else x for x, time in zip(given, timed, strict=True)]
            return call(state, tensors, as_rows)

        y = self._source.call_with_all_state(TokenFunction(run, several), inputs, path)
        if exports:
            y, *more = self._source.unpacked(y, 1 + len(exports))
            self._exports |= zip(exports, more, strict=True)
        return y

    def _primitive(self, module: Primitive, node: graph.OpNode, inputs: Sequence[str], path: Path) -> str | None:
        return self._op(module, node, inputs, path) if _as_declared(module, node) else None

    def _op(self, module: Primitive, node: graph.OpNode, inputs: Sequence[str], path: Path) -> str | None:
        """Call the op's function for one token, or its `forward`."""
        op, call, given = module.op, self._call, self._given
        parameters = given(module)
        self._source.splits &= all(has_tokens(self._types[value]) for value in (*node.reads, *node.outputs[:1]))
        self._source.calls_modules |= not op.builtin

        def prepare() -> TokenFunction | None:
            if module.op is not op:
                return None
            parameters = given(module)
            made = _prepared(op, parameters)
            return TokenFunction(partial(op.forward, parameters, call)) if made is None and converts else made

        is_row = self._frames.is_rowwise(node)
        as_row = is_row and is_pointwise(op)
        converts = as_row and self._half is not None
        made = None if self._half and keeps_cache(node) else prepare()
        whole = None if is_row and (made or as_row) else self._of_sequences(module, node)
        run = self._source.prepared(prepare, made) if self._frames.runs(node, made) else None
        derived = run is not None and (self._half is not None or not is_own_matrix(op, parameters))
        if run is None:
            made = TokenFunction(partial(op.forward, parameters, self._call)) if as_row else whole
            if made is None:
                return None
            run = self._source.constant(made)
        self._note_parameters(module, derived)
        assert made is not None
        several = self._frames.several(node, made, self._source.constant(whole.several) if whole else "")
        self._source.splits &= several is None or several.is_possible
        return self._source.call(run, self._at_ports(node, inputs), path, [*node.state], several)

    def _of_sequences(self, module: Any, node: graph.OpNode) -> TokenFunction | None:
        """Return a function that runs a primitive's `forward`, or None if the module must run."""
        if not takes_plain_tokens(module) or (node.vectors and not self._frames.have_several_tokens):
            return None
        parameters = parameters_of(module, self._call)
        first = [next(iter(node.inputs.get(port.name, ())), None) for port in node.op.ports]
        timed = [value is not None and (has_tokens(self._types[value]) or value in node.vectors) for value in first]
        names, made, grid, phase = [*node.state], has_tokens(node.type), self._grid, self._phase
        half, reads_float32 = self._half, module.op.mixed
        kinds = [dtype_of(state, self.dtype) for state in node.state.values()]

        def forward(state: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
            if half:
                state = [x.to(kind) for x, kind in zip(state, kinds, strict=True)]
                inputs = inputs if reads_float32 else [to_half(x, half) for x in inputs]
            call = Call(False, dict(zip(names, state, strict=True)), True, None, False, True, grid, phase=phase)
            y, after = checked(module, module.op.forward(parameters, call, *inputs), call)
            return y.float() if half else y, [after[name] for name in names]

        def run(*given: Any) -> Any:  # the state comes first, then the inputs
            inputs = [x.unsqueeze(1) if time else x for x, time in zip(given[len(names) :], timed, strict=True)]
            y, after = forward(given[: len(names)], inputs)
            y = y.squeeze(1) if made else y
            return (y, *after) if names else y

        def several(batch: int, *given: Any) -> Any:
            inputs = [as_sequences(x, batch) if time else x for x, time in zip(given[len(names) :], timed, strict=True)]
            y, after = forward(given[: len(names)], inputs)
            y = as_rows(y) if made else y
            return (y, *after) if names else y

        return TokenFunction(run, several, math.inf)

    def _block(self, module: Block, node: graph.BlockNode, inputs: Sequence[str], path: Path) -> str:
        return self._body(module, node.bodies[""], inputs, path)

    def _scan(self, module: Scan, node: graph.ScanNode, inputs: Sequence[str], path: Path) -> str | None:
        """Run a scan in token order as a block; other scans are not supported."""
        return self._body(module, node.bodies[""], inputs, path) if node.is_forward else None

    def _cell(self, module: Cell, node: graph.CellNode, inputs: Sequence[str], path: Path) -> str | None:
        """Run the steps of a cell on one token, with its states as variables."""
        if self._frames.have_several_tokens:
            return None
        self._source.splits = False
        body, source = node.bodies[""], self._source
        before = {name: source.given((*path, name)) for name in body.ports}
        if STARTED in node.state:
            started = source.assign(f"{source.given((*path, STARTED))} != 0")
            choose = source.constant(torch.where)
            for name, state in before.items():
                if (own := f"start_{name}") in node.parameters:
                    before[name] = source.assign(f"{choose}({started}, {state}, {self._parameter(module, own)})")
            source.keep((*path, STARTED), f"{source.constant(torch.ones_like)}({source.given((*path, STARTED))})")
        read = dict(zip(node.reads, inputs, strict=True))
        values = [inputs[0], *before.values(), *(read[value] for value in body.captures)]
        phase, self._phase = self._phase, None  # the steps of a cell are those of one token in any case
        try:
            return self._body(module, body, values, path)
        finally:
            self._phase = phase

    def _parameter(self, module: Cell, name: str) -> str:
        """Return an expression for a parameter of a module that is no primitive."""
        self._note_parameters(module, derived=self._half is not None)
        given = self._given
        found = self._source.prepared(lambda: given(module)[name])
        assert found is not None
        return found

    def _experts(self, module: Experts, node: graph.ExpertsNode, inputs: Sequence[str], path: Path) -> str | None:
        """Run the chosen experts, each by its own function."""
        router, labels = module._modules["router"], module.labels
        if not is_built(router) or is_hooked(router) or module.needs_each:
            return None
        if any(type(layer := module._modules[label]) is not Body or is_hooked(layer) for label in labels):
            return None
        router_node, *_ = node.bodies[""].nodes
        logits = self._node(self._child(module, "router"), router_node, inputs[:1], (*path, "router"))
        values = dict(zip(node.reads, inputs, strict=True))
        read = [inputs[0], *(values[value] for value in node.bodies[labels[0]].captures)]
        experts = [self._expert(module, label, node.bodies[label], len(read), path) for label in labels]
        call = self._call

        def run(experts: tuple[Callable[..., Tensor], ...], logits: Tensor, *tokens: Tensor) -> Tensor:
            _, weights, chosen = module.route(logits, call)
            if len(chosen) != 1:
                return on_routed(experts, [*tokens], weights, chosen, each=False)
            y = torch.stack([experts[at](*tokens) for at in chosen[0].tolist()], 1)
            return (y * weights.unsqueeze(-1)).sum(1).to(y.dtype)

        run_name = self._source.constant(TokenFunction(run))
        y = self._source.call(run_name, [f"({', '.join(experts)},)", logits, *read], path, [])
        if SHARED not in node.bodies:
            return y
        return self._source.assign(f"{y} + {self._layer(module, SHARED, node.bodies[SHARED], inputs[0], values, path)}")

    def _expert(self, module: Experts, label: str, body: Graph, count: int, path: Path) -> str:
        """Write the function of an expert with `count` inputs and return its name."""
        layer, inputs = self._child(module, label), [self._source.variable() for _ in range(count)]
        self._guard.note_bypassed(layer)
        with self._frames.as_rows():
            return self._source.define(inputs, lambda: self._body(layer, body, inputs, (*path, label)))

    def _residual(self, module: Residual, node: graph.ResidualNode, inputs: Sequence[str], path: Path) -> str:
        y = self._body(module, node.bodies[""], inputs, path)
        return self._source.assign(f"{inputs[0]} + {y}")

    def _repeat(self, module: Repeat, node: graph.RepeatNode, inputs: Sequence[str], path: Path) -> str:
        x, values = inputs[0], dict(zip(node.reads, inputs, strict=True))
        for label, body in node.bodies.items():
            x = self._layer(module, label, body, x, values, path)
            values |= {value: self._exports[value] for value in body.exports}
        return x

    def _parallel(self, module: Parallel, node: graph.ParallelNode, inputs: Sequence[str], path: Path) -> str:
        values = dict(zip(node.reads, inputs, strict=True))
        made = [self._layer(module, *item, inputs[0], values, path) for item in node.bodies.items()]
        merge = self._source.constant(TokenFunction(lambda *results: merged([*results], node.arguments.merge)))
        return self._source.call(merge, made, path, [])

    def _layer(
        self, module: nn.Module, label: str, body: Graph, x: str, values: Mapping[int, str], path: Path
    ) -> str:
        layer, read = self._child(module, label), [x, *(values[value] for value in body.captures)]
        if type(layer) is Body and not is_hooked(layer):
            self._guard.note_bypassed(layer)
            return self._body(layer, body, read, (*path, label))
        timed = [has_tokens(self._types[value]) for value in body.reads]
        return self._call_module(layer, None, timed, timed[0], read, (*path, label), body.exports)


PLANNED: dict[type[nn.Module], Callable[[TokenPlan, Any, Any, Sequence[str], Path], str | None]] = {
    **dict.fromkeys([*PRIMITIVES, nn.Linear], TokenPlan._primitive), Block: TokenPlan._block, Scan: TokenPlan._scan,
    Residual: TokenPlan._residual, Repeat: TokenPlan._repeat, Parallel: TokenPlan._parallel,
    Experts: TokenPlan._experts, Cell: TokenPlan._cell,
}  # fmt: skip


def is_plain(module: nn.Module | None, node: Node) -> bool:
    """Return whether a module is the declared primitive without hooks, whose parameters can be prepared."""
    return is_built(module) and not is_hooked(module) and _as_declared(module, node)


def _matrix(module: nn.Module | None, node: Node, given: Callable[[Any], dict[str, Any]]) -> Matrix | None:
    """Return the linear map of a module if it is small enough to be copied next to others, or None."""
    if not is_plain(module, node):
        return None
    assert is_primitive(module)
    found = module.op.matrix(given(module))
    return Matrix(*found) if found and isinstance(found[0], Tensor) and found[0].numel() <= COPY_MAX_ELEMENTS else None


def _memory(x: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is in memory, and how it is read."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _as_they_are(parameters: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return what changes when one of these parameters is replaced, moved or modified."""
    return [(id(x), x._version, *_memory(x)) for x in parameters]


def _prepared(op: Op, parameters: dict[str, Any]) -> TokenFunction | None:
    """Return a function for one token of an op that prepares one or is a matrix, otherwise None."""
    run: Any = op.prepare_token(parameters)
    if run is not None and not isinstance(run, TokenFunction):
        cls = type(op)
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__}.prepare_token must return a TokenFunction or None, not {run!r:.80}"
        )
    if run is None and (matrix := op.matrix(parameters)) is not None:
        return TokenFunction(prepare_joined([Matrix(*matrix)]))
    made: TokenFunction | None = run
    return made


def is_own_matrix(op: Op, parameters: dict[str, Any]) -> bool:
    """Return whether an op's function for one token reads a parameter as its matrix, so that nothing is derived."""
    matrix = op.matrix(parameters) if type(op).prepare_token is Op.prepare_token else None
    own = {id(x) for x in (None, *parameters.values()) if not isinstance(x, StoredMatrix)}
    return matrix is not None and all(id(x) in own for x in matrix[:2])


def _as_declared(module: Primitive, node: Node) -> bool:
    """Return whether a module has its node's op and plain parameters as declared, whether owned or shared."""
    held = holders(module)
    plain = all(isinstance(table.get(name), nn.Parameter | Int8Matrix) for table, name in held.values())
    return module.__dict__.get("op") == node.op and held.keys() == node.parameters.keys() and plain


def holders(module: Primitive | Cell) -> dict[str, tuple[Any, str]]:
    """Return, for each parameter, the dict that holds it and its name there."""
    own: dict[str, tuple[Any, str]] = {name: (module._parameters, name) for name in module._parameters}
    own |= {name: (module._modules, name) for name, each in module._modules.items() if isinstance(each, Int8Matrix)}
    shared: dict[str, tuple[Any, str]] = {
        name: (owner._parameters if original in owner._parameters else owner._modules, original)
        for name, (owner, original) in getattr(module, "_owners", NONE).items()
    }
    return own | shared


def is_pointwise(op: Op) -> bool:
    """Return whether `forward` accepts a token without a time axis, because it also takes vectors or token ids."""
    pointwise = all(any(kind in POINTWISE for kind in port.kinds) for port in op.ports)
    return pointwise and op.reads == "token" and type(op).state is Op.state
