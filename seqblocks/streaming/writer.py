"""Write the function of one token of a stream, which runs all steps of a model in order and checks the state.

The function is source text, generated from the graph; the only user input in it is quoted names. Ops may provide a
function of tokens (`Op.prepare_token`); otherwise their `forward` runs. `seqblocks/streaming/source.py` holds the text.
Short prompts and frames are read by a second function, made of the same calls: `seqblocks/streaming/frames.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.errors import UsageError
from seqblocks.graph import Graph, ModelSpec, Node, OpNode, begins, is_context
from seqblocks.kernels.half import may_copy
from seqblocks.kernels.int8 import Int8Matrix, scales
from seqblocks.kernels.joined import COPY_MAX_ELEMENTS, Matrix, prepare_joined
from seqblocks.kernels.stored import StoredMatrix
from seqblocks.op import Op
from seqblocks.runtime.body import Body, tail_of
from seqblocks.runtime.call import Call, Grid, Phase
from seqblocks.runtime.cell import Cell
from seqblocks.runtime.modules import call_child, is_hooked, may_draw, take_exports
from seqblocks.runtime.primitive import Primitive, checked, is_primitive, parameters_of, takes_plain_tokens
from seqblocks.runtime.shared_parameters import owners_of
from seqblocks.runtime.torch_modules import is_built
from seqblocks.state import States, dtype_of
from seqblocks.streaming.frames import Frames
from seqblocks.streaming.guard import Guard
from seqblocks.streaming.half import keeps_cache, to_half, token_parameters
from seqblocks.streaming.maps import Reader, readers
from seqblocks.streaming.source import Path, PlanSource
from seqblocks.streaming.token_rows import as_sequences, has_tokens, on_sequences
from seqblocks.token_function import TokenFunction

Names = dict[int, str]  # of the variables of values, by number
Write = Callable[["PlanWriter", Any, Any, Sequence[str], Path], str | None]

COMBINATORS: dict[type[nn.Module], Write] = {}  # what writes the steps of a module of this class; None: it cannot


class PlanWriter:
    """Writes the function of a model by a walk over the nodes of its bodies. A subclass may write steps differently.

    source: the text; result: the output in it. guard: what must not change. frames: how several tokens are computed.
    """

    takes_half = True  # whether it writes functions of models in 16 bits

    def __init__(self, model: Body, spec: ModelSpec, declared: States, half: torch.dtype | None) -> None:
        """half: the dtype of a model in 16 bits, None for others."""
        parameters = list(model.parameters())
        self.half, self.dtype = half, half or next(chain(parameters, scales(model))).dtype
        self.types, self.frames = spec.types, Frames(spec.graph, spec.types)
        self.grid = Grid(spec.input.grid)
        self.phase: Phase = "stream" if begins(spec.graph) else None
        self.call = Call(False, None, True, None, False, True, self.grid, phase=self.phase)
        size = sum(x.numel() * x.element_size() for x in parameters)
        # Functions of tokens capture this one: one that referred to the writer would be a cycle.
        self.given = partial(token_parameters, call=self.call, copies=may_copy(size))
        self.exports: Names = {}  # of the values that bodies export, so far
        self.guard, self.source = Guard(), PlanSource(self.dtype)
        self.guard.note_owner(model)
        self.source.unpack(declared, ())
        if self.half and spec.input.kind != "tokens":
            self.source.add("x = x.float()")
        kept = spec.graph.kept  # inputs that do not stream, which steps of the stream read
        context = (self.source.carry_over(("input", name)) if name in kept else "None" for name in spec.graph.ports)
        y = self.body(model, spec.graph, ["x", *context], ())
        self.result = y if spec.graph.outputs else self._output({spec.graph.result: y}, spec.graph.result)
        self.guard.compile()

    @property
    def can_run(self) -> bool:
        """Return whether the function may run: modules compute a 16-bit model in 16 bits, and this one in float32."""
        return not (self.half and self.source.calls_modules)

    def child(self, parent: nn.Module, name: str) -> nn.Module:
        child = parent._modules[name]
        assert child is not None
        self.guard.note_entry(parent._modules, name)
        return child

    def _bypassed(self, module: nn.Module, nodes: Sequence[OpNode]) -> list[Any]:
        """Return the modules of steps for which a function runs that is derived from their parameters."""
        found: list[Any] = [self.child(module, node.name) for node in nodes]
        for child in found:
            self.guard.note_bypassed(child)
            self._note_parameters(child, derived=True)
        return found

    def parameter(self, module: Cell, name: str) -> str:
        """Return an expression for a parameter of a module that is no primitive."""
        self._note_parameters(module, derived=self.half is not None)
        given = self.given
        return self.source.prepared(lambda: given(module)[name]) or "None"

    def _note_parameters(self, module: Primitive | Cell, derived: bool) -> None:
        for table, name in holders(module).values():
            self.guard.note_entry(table, name)
            if isinstance(x := table[name], Int8Matrix):
                for part, values in x.named_buffers():
                    self.guard.note_entry(x._buffers, part)
                    self.guard.note_values(values)
            elif derived:
                self.guard.note_values(x)

    def _note_evaluation(self, module: nn.Module) -> None:
        self.guard.note_evaluation(module)

    # --- bodies and nodes: each returns the variable of its result, or those of several by value ----------------------

    def body(self, module: nn.Module, body: Graph, inputs: Sequence[str], path: Path) -> str:
        values = dict(zip(body.reads, inputs, strict=True))
        for node in filter(is_context, body.nodes):
            values |= self._context_outputs(node, (*path, node.name))
        nodes = [node for node in body.nodes if not is_context(node)]
        with_maps = dict(self._with_maps(module, body, nodes))
        replaced = {node.outputs[0] for reader, _ in with_maps.values() for node in reader.maps}
        nodes = [node for node in nodes if node.outputs[0] not in replaced]
        matrices = _of_one_input(nodes, partial(self._matrix, module))
        products = {found[0][0].outputs[0]: found for found in matrices}
        for at, node in enumerate(nodes):
            if not self.frames.have_several_tokens and node.name == tail_of(module):
                later = {*body.results, *(value for other in nodes[at:] for value in other.reads)}
                self.source.continue_with_last(values[value] for value in later & values.keys())
            if node.outputs[0] in values:  # already computed in one product with an earlier step
                continue
            if reader := with_maps.get(node.outputs[0]):
                values |= self.write_reader(module, *reader, values, path)
            elif found := products.get(node.outputs[0]):
                values |= self.write_product(module, found, values, path)
            else:
                values |= self.write_one(module, node, values, path)
            values |= {here: self.exports[inside] for here, inside in node.exports.items()}
        self.exports |= {value: values[value] for value in body.exports}
        for name, value in body.carried.items():  # memory of its own: it may be the input, or a part of another value
            self.source.keep((*path, name), f"{values[value]}.clone()")
        if not body.outputs:
            return values[body.result]
        named = (f"{name!r}: {self._output(values, value)}" for name, value in body.outputs.items())
        return self.source.assign("{" + ", ".join(named) + "}")

    def _output(self, values: Names, value: int) -> str:
        """Return an expression for an output of the model."""
        wire = self.types[value]
        is_converted = self.half and not (wire and wire.kind == "tokens")  # token ids are whole numbers
        y = f"{values[value]}.to({self.source.constant(self.half)})" if is_converted else values[value]
        if not self.frames.have_several_tokens or not has_tokens(wire):
            return y
        return f"{self.source.constant(as_sequences)}({y}, batch).contiguous()"

    def _context_outputs(self, node: Node, path: Path) -> Names:
        """Return the outputs of a context step, 'None' unless the state holds them."""
        made = dict.fromkeys(node.made, "None")
        if node.kept:
            made |= self._parts(node, self.source.carry_over((*path, "output")))
            made |= {value: self.source.carry_over((*path, part)) for part, value in node.kept_exports.items()}
        return made

    def write_one(self, module: nn.Module, node: Node, values: Names, path: Path) -> Names:
        """Compute one step."""
        read = [values[value] for value in node.reads]
        return self._parts(node, self.node(self.child(module, node.name), node, read, (*path, node.name)))

    def _parts(self, node: Node, y: str) -> Names:
        """Return the outputs of a node, which are parts of `y` if it is split."""
        if not node.split or not node.type:
            return {node.outputs[0]: y}
        return dict(zip(node.outputs, self.source.split(y, node.split, node.type.feature_axis), strict=True))

    def _at_ports(self, node: OpNode, inputs: Sequence[str]) -> list[str]:
        """Return an argument for each port, with vectors repeated for each token of a frame."""
        if many := self.frames.vector_repeats(node):
            pairs = zip(node.reads, inputs, strict=True)
            inputs = [self.source.assign(f"{x}.repeat({many}, 1)") if v in node.vectors else x for v, x in pairs]
        return self.source.at_ports(node, inputs)

    def write_product(self, module: nn.Module, found: list[tuple[OpNode, Matrix]], values: Names, path: Path) -> Names:
        """Compute linear maps of the same input in one product."""
        nodes, given = [node for node, _ in found], self.given
        children = self._bypassed(module, nodes)

        def prepare() -> TokenFunction | None:
            matrices = [_matrix(child, node, given) for child, node in zip(children, nodes, strict=True)]
            return None if None in matrices else TokenFunction(prepare_joined([each for each in matrices if each]))

        run = self.source.prepared(prepare)
        assert run is not None
        y = self.source.call(run, self._at_ports(nodes[0], [values[value] for value in nodes[0].reads]), (), [])
        parts = self.source.split(y, tuple(matrix.weight.shape[0] for _, matrix in found))
        return {node.outputs[0]: part for node, part in zip(nodes, parts, strict=True)}

    def _matrix(self, module: nn.Module, node: OpNode) -> Matrix | None:
        return _matrix(module._modules[node.name], node, self.given)

    def _with_maps(self, module: nn.Module, body: Graph, nodes: list[Node]) -> Iterator[tuple[int, tuple[Reader, str]]]:
        """Yield the output of each step that computes its inputs, with the step and the variable of its function."""
        modules: dict[str, Any] = module._modules
        given = self.given

        def function(node: OpNode) -> TokenFunction | None:
            return node.op.prepare_token(given(modules[node.name]))

        def is_simple(node: Node) -> bool:
            return not self.frames.vector_repeats(node) and is_plain(modules[node.name], node)

        for reader in readers(body, nodes, is_simple):
            made = reader.prepare(function)
            by_token = self.frames.runs(reader.node, made) and all(map(self.frames.is_rowwise, reader.maps))
            run = self.source.prepared(partial(reader.prepare, function), made) if by_token else None
            if run is not None:
                self._bypassed(module, [reader.node, *reader.maps])
                yield reader.node.outputs[0], (reader, run)

    def write_reader(self, module: nn.Module, reader: Reader, run: str, values: Names, path: Path) -> Names:
        """Call the function of a step that computes its inputs."""
        node, inputs = reader.node, [values[value] for value in reader.sources]
        whole = self._whole(module, [node, *reader.maps], reader.of_several)
        several = self.frames.several(node, self.source.values[run], whole)
        return {node.outputs[0]: self.source.call(run, inputs, (*path, node.name), [*node.state], several=several)}

    def _whole(self, module: nn.Module, nodes: Sequence[OpNode], join: Callable[[list[Any]], Any]) -> str:
        """Return the name of what `join` makes of the steps' functions of several tokens, or "" if one has none."""
        found = [self._of_sequences(module._modules[node.name], node) for node in nodes]
        return self.source.constant(join([each.several for each in found if each])) if all(found) else ""

    def node(self, module: Any, node: Node, inputs: Sequence[str], path: Path) -> str:
        draws, y = may_draw(module), None
        if not is_hooked(module) and not (draws and module.training):
            if isinstance(node, OpNode):
                y = self._op(module, node, inputs, path) if is_plain(module, node) else None
            elif write := COMBINATORS.get(type(module)):
                y = write(self, module, node, inputs, path)
        if y is None:
            return self.call_module(module, node, node.reads, [node.outputs[0], *node.exports.values()], inputs, path)
        self.guard.note_bypassed(module)
        if draws:
            self._note_evaluation(module)
        return y

    def call_module(
        self, module: nn.Module, node: Node | None, reads: Sequence[int], makes: Sequence[int], inputs: Sequence[str],
        path: Path,
    ) -> str:
        """Call a module with sequences of one token, or of several. makes: its output, and what later steps read."""
        for each in filter(is_hooked, module.modules()):
            self.guard.note_hooked(each)
        timed, made = ([has_tokens(self.types[value]) for value in values] for values in (reads, makes))
        self.source.splits &= all(timed) and all(made)
        size, phase, exports = self.grid.size, self.phase, {value: value for value in makes[1:]}

        def run(state: States | None, *tensors: Tensor) -> tuple[Any, ...]:
            call = Call(False, state, True, None, False, True, Grid(size), phase=phase)  # steps may set the grid
            y, states = call_child(module, tensors, call, path[-1], node)
            return y, *(take_exports(call, exports, path[-1]).values() if exports else ()), states

        function = on_sequences(run, [False, *timed], [*made, False])
        y, *more = self.source.call_with_all_state(function, inputs, path, len(makes))
        self.exports |= zip(exports, more, strict=True)
        return y

    def _op(self, module: Primitive, node: OpNode, inputs: Sequence[str], path: Path) -> str | None:
        """Call the op's function for one token, or its `forward`."""
        op, call, given = module.op, self.call, self.given
        parameters = given(module)
        self.source.splits &= all(has_tokens(self.types[value]) for value in (*node.reads, *node.outputs[:1]))
        self.source.calls_modules |= not op.builtin
        is_row = self.frames.is_rowwise(node)
        as_row = is_row and is_pointwise(op)
        converts = as_row and self.half is not None

        def prepare() -> TokenFunction | None:
            if module.op is not op:
                return None
            parameters = given(module)
            made = _prepared(op, parameters)
            return TokenFunction(partial(op.forward, parameters, call)) if made is None and converts else made

        made = None if self.half and keeps_cache(node) else prepare()
        whole = None if is_row and (made or as_row) else self._of_sequences(module, node)
        run = self.source.prepared(prepare, made) if self.frames.runs(node, made) else None
        derived = run is not None and (self.half is not None or not is_own_matrix(op, parameters))
        if run is None:
            made = TokenFunction(partial(op.forward, parameters, call)) if as_row else whole
            if made is None:
                return None
            run = self.source.constant(made)
        self._note_parameters(module, derived)
        assert made is not None
        several = self.frames.several(node, made, self.source.constant(whole.several) if whole else "")
        self.source.splits &= several is None or several.is_possible
        return self.source.call(run, self._at_ports(node, inputs), path, [*node.state], several)

    def _of_sequences(self, module: Any, node: OpNode) -> TokenFunction | None:
        """Return a function that runs a primitive's `forward`, or None if the module must run."""
        if not takes_plain_tokens(module) or (node.vectors and not self.frames.have_several_tokens):
            return None
        parameters, grid, phase = parameters_of(module, self.call), self.grid, self.phase
        first = [next(iter(node.inputs.get(port.name, ())), None) for port in node.op.ports]
        timed = [value is not None and (has_tokens(self.types[value]) or value in node.vectors) for value in first]
        names, untimed, half, reads_float32 = [*node.state], [False] * len(node.state), self.half, node.op.mixed
        kinds = [dtype_of(state, self.dtype) for state in node.state.values()]

        def run(*given: Any) -> tuple[Any, ...]:  # the state comes first, then the inputs
            state, inputs = given[: len(names)], given[len(names) :]
            if half:
                state = tuple(x.to(kind) for x, kind in zip(state, kinds, strict=True))
                inputs = inputs if reads_float32 else tuple(to_half(x, half) for x in inputs)
            call = Call(False, dict(zip(names, state, strict=True)), True, None, False, True, grid, phase=phase)
            y, after = checked(module, module.op.forward(parameters, call, *inputs), call)
            return y.float() if half else y, *(after[name] for name in names)

        return on_sequences(run, [*untimed, *timed], [has_tokens(node.type), *untimed])


def _of_one_input(
    nodes: Sequence[Node], matrix: Callable[[OpNode], Matrix | None]
) -> Iterator[list[tuple[OpNode, Matrix]]]:
    """Yield the steps that multiply the same input by a matrix, with their matrices."""
    readers = defaultdict[tuple[int, ...], list[OpNode]](list)
    for node in nodes:
        if isinstance(node, OpNode) and not node.split:
            readers[node.reads].append(node)
    for several in readers.values():
        found = [(node, made) for node in several if (made := matrix(node))] if len(several) > 1 else []
        if len(found) > 1:
            yield found


def is_plain(module: nn.Module | None, node: Node) -> bool:
    """Return whether a module is the declared primitive, with plain parameters, owned or shared, and no hooks."""
    if not is_built(module) or is_hooked(module) or module.__dict__.get("op") != node.op:
        return False
    held = holders(module)
    plain = all(isinstance(table.get(name), nn.Parameter | Int8Matrix) for table, name in held.values())
    return plain and held.keys() == node.parameters.keys()


def _matrix(module: nn.Module | None, node: Node, given: Callable[[Any], dict[str, Any]]) -> Matrix | None:
    """Return the linear map of a module if it is small enough to be copied next to others, or None."""
    if not is_plain(module, node):
        return None
    assert is_primitive(module)
    found = module.op.matrix(given(module))
    return Matrix(*found) if found and isinstance(found[0], Tensor) and found[0].numel() <= COPY_MAX_ELEMENTS else None


def _prepared(op: Op, parameters: dict[str, Any]) -> TokenFunction | None:
    """Return a function for one token of an op that prepares one or is a matrix, otherwise None."""
    run: Any = op.prepare_token(parameters)
    if run is None and (matrix := op.matrix(parameters)) is not None:
        return TokenFunction(prepare_joined([Matrix(*matrix)]))
    if run is None or isinstance(run, TokenFunction):
        return run
    name = f"{type(op).__module__}.{type(op).__qualname__}.prepare_token"
    raise UsageError(f"{name} must return a TokenFunction or None, not {run!r:.80}")


def is_own_matrix(op: Op, parameters: dict[str, Any]) -> bool:
    """Return whether an op's function for one token reads a parameter as its matrix, so that nothing is derived."""
    matrix = op.matrix(parameters) if type(op).prepare_token is Op.prepare_token else None
    own = {id(x) for x in (None, *parameters.values()) if not isinstance(x, StoredMatrix)}
    return matrix is not None and all(id(x) in own for x in matrix[:2])


def holders(module: Primitive | Cell) -> dict[str, tuple[Any, str]]:
    """Return, for each parameter, the dict that holds it and its name there."""
    found: dict[str, tuple[Any, str]] = {name: (module._parameters, name) for name in module._parameters}
    found |= {name: (module._modules, name) for name, each in module._modules.items() if isinstance(each, Int8Matrix)}
    for name, (owner, original) in owners_of(module).items():
        found[name] = owner._parameters if original in owner._parameters else owner._modules, original
    return found


def is_pointwise(op: Op) -> bool:
    """Return whether `forward` accepts a token without a time axis, because it also takes vectors or token ids."""
    pointwise = all({"vector", "tokens"}.intersection(port.kinds) for port in op.ports)
    return pointwise and op.reads == "token" and type(op).state is Op.state
