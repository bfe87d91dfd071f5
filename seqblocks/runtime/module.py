"""The torch modules: one for primitives, one for each kind of body. They own what the graph declares and run it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.kernels.dispatch.compiled import constant
from seqblocks.op import Op
from seqblocks.runtime import fusion
from seqblocks.runtime.fusion import Fused, Part
from seqblocks.state import States, owned
from seqblocks.types import Wire


@dataclass(slots=True)
class Grid:
    """Rows and columns of the images whose tokens are under way; patch_embed adds its own for the steps that follow."""

    size: tuple[int, int] | None = None  # the latest
    others: tuple[tuple[int, int], ...] = ()  # the earlier ones, where several steps cut the image

    def of(self, tokens: int) -> tuple[int, int] | None:
        """Those of so many tokens, the latest if there are several; None where no grid has as many."""
        grids = (self.size, *self.others) if self.size else ()
        return next((grid for grid in grids if grid and grid[0] * grid[1] == tokens), None)


@dataclass(slots=True)
class Call:
    """What goes with the tensors of one call.

    state: of the step at hand, or None; keep: whether new states are wanted; resets [batch, seq]: True where a token is
    the first of a new sequence (in the order scanned); reverse: scan from right to left; streaming: the call carries
    state, so an op must not look beyond what it is given; owned: parameters of a scan's direction, by step path.
    """

    training: bool
    state: States | None = None
    keep: bool = False
    resets: Tensor | None = None
    reverse: bool = False
    streaming: bool = False
    grid: Grid | None = None
    owned: dict[str, nn.Module] | None = None

    @property
    def compiling(self) -> bool:
        return torch.compiler.is_compiling()

    def into(self, name: str) -> Call:
        """The call as the step called `name` sees it."""
        if not self.streaming:
            return self
        return replace(self, state=self.state.get(name) if self.state else None)

    def set_grid(self, size: tuple[int, int]) -> None:
        if self.grid:
            if self.grid.size and self.grid.size != size:
                self.grid.others = (self.grid.size, *self.grid.others)
            self.grid.size = size

    def grid_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the tokens x [batch, seq, features]. Raises RunError."""
        found = self.grid.of(x.shape[1]) if self.grid else None
        if found is None:
            size = self.grid.size if self.grid else None
            raise RunError(
                f"the {x.shape[1]} tokens are not a grid"
                + (f" of {size[0]} x {size[1]}" if size else "")
                + "; say grid=(rows, columns) in the call"
            )
        return found


def reads(node: Node) -> tuple[int, ...]:
    """The values a node's module is handed: its inputs in order, then what its bodies capture."""
    wanted = [v for values in node.inputs.values() for v in values]
    wanted += [v for body in node.bodies.values() for v in body.captures]
    made = {body.result for body in node.bodies.values()} if node.kind == "repeat" else set()
    inputs = {v for values in node.inputs.values() for v in values}
    return tuple(dict.fromkeys(v for v in wanted if v in inputs or v not in made))


def hooked(step: nn.Module) -> bool:
    """Whether somebody wants to see what it is called with or what it returns, or computes it another way."""
    return bool(
        step._forward_hooks or step._forward_pre_hooks or step._backward_hooks or step._backward_pre_hooks
        or "forward" in step.__dict__
    )


class Primitive(nn.Module):
    """Owns the parameters that an op declares, and calls the op."""

    def __init__(self, node: Node, path: str, types: dict[int, Wire | None], skip: frozenset[str]) -> None:
        super().__init__()
        assert node.op is not None
        self.op, self._path, self._type = node.op, path, node.type
        self._stateful = type(node.op).state is not Op.state  # such an op returns (output, state)
        self._sizes = [len(node.inputs.get(port.name, ())) for port in node.op.ports]
        self._axis = _joining_axis(node)
        self._own = [name for name in node.parameters if graph.join(path, name) not in skip]
        self._lent = [name for name in node.parameters if name not in self._own]
        for name in self._own:
            self.register_parameter(name, nn.Parameter(torch.empty(node.parameters[name].shape)))

    def own(self, call: Call) -> dict[str, Any]:
        """Its parameters by name, or those of the direction that is under way.

        By attribute: parametrizations, pruning and sharding put something else than a parameter there.
        """
        own: dict[str, Any] = {name: getattr(self, name) for name in self._own}
        if call.owned and self._path in call.owned:
            other = call.owned[self._path]
            own |= {name: getattr(other, name) for name in self._lent if hasattr(other, name)}
        return own

    def _finish(self, tensors: list[Tensor], call: Call, fused: Fused, behind: list[Part]) -> tuple[Tensor, States]:
        """What `forward` gives, and the steps behind it on that, as one."""
        return fused.run([(self.op, self.own(call), [*tensors]), *behind]), {}

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        own = self.own(call)
        inputs: list[Any] = []
        at = 0
        for size in self._sizes:
            part = tensors[at : at + size]
            inputs.append(None if not part else part[0] if size == 1 else torch.cat(part, self._axis))
            at += size
        out = self.op.forward(own, call, *inputs)
        if not self._stateful:
            return out, {}
        if not isinstance(out, tuple) or len(out) != 2:
            what = f"{type(self.op).__module__}.{type(self.op).__qualname__}.forward"
            raise UsageError(f"{what} must give (output, state), as the op declares a state, not {type(out).__name__}")
        y, state = out
        if call.keep and isinstance(state, dict):
            state = {name: owned(x) for name, x in state.items()}
        return y, state

    def _get_name(self) -> str:
        return self.op.verb

    def extra_repr(self) -> str:
        given = [f"{k}={v}" for k, v in self.op.model_dump(exclude_defaults=True).items()]
        return ", ".join([*given, f"out={self._type}"])


def _called(
    child: nn.Module | None, tensors: list[Tensor], call: Call, name: str, node: Node | None = None
) -> tuple[Tensor, States]:
    """What a child gives: a module of this file, a wrapper that hands on whatever it is called with, or what a user
    has put in the place of a step (nn.Identity(), say) or of a layer (then without a node): that knows no calls."""
    assert child is not None
    if isinstance(child, (Primitive, Body, Repeat, Parallel)):
        done: tuple[Tensor, States] = child(*tensors, call=call)
        return done
    if _hands_on(type(child)):
        found: Any = child(*tensors, call=call)
        if isinstance(found, tuple):
            return found
    else:
        found = child(*_joined(tensors, node))
    if call.streaming and not (node is not None and node.op is not None and node.op.reads == "token"):
        raise RunError(f"{name}: the {type(child).__name__} that stands in its place carries no state")
    return found, {}


def _joined(tensors: list[Tensor], node: Node | None) -> list[Tensor]:
    """What a module without ports is handed: an op's inputs, each joined; of a layer its input alone."""
    if node is None or node.op is None:
        return tensors if node is not None else tensors[:1]
    rest = iter(tensors)
    ports = [[next(rest) for _ in values] for values in node.inputs.values()]
    return [part[0] if len(part) == 1 else torch.cat(part, _joining_axis(node)) for part in ports if part]


def _joining_axis(node: Node) -> int:
    """The axis along which an op's inputs are joined: that of the features of what it joins."""
    assert node.op is not None
    several = (w for w, port in zip(node.wires, node.op.ports, strict=True) if len(node.inputs.get(port.name, ())) > 1)
    return next((wire.feature_axis for wire in several if wire), -1)


@constant
def _hands_on(kind: type[nn.Module]) -> bool:
    if kind.forward is nn.Module.forward:  # it calls another way, as what torch.compile makes of a module does
        return True
    parameters = inspect.signature(kind.forward).parameters
    return "call" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


Tail = tuple[Fused, list[Part]]


class Body(nn.Module):
    """Runs the nodes of a graph in order; children carry the nodes' names."""

    def __init__(self, body: Graph, model: ModelSpec, path: str, skip: frozenset[str], label: str = "") -> None:
        super().__init__()
        self._body, self._label = body, label
        for node in body.nodes:
            # not add_module: it refuses names that nn.Module has too, and the analysis has refused those that matter
            self._modules[node.name] = make(node, model, graph.join(path, node.name), skip)
        self._plan = [(node.name, _handed(node), node.outputs, node.split) for node in body.nodes]
        self._axes = [node.type.feature_axis if node.split and node.type else -1 for node in body.nodes]
        self._dying = _dying(body, self._plan)
        self._fused = fusion.find(body, model.types)

    def _run(self, env: dict[int, Tensor], call: Call, tail: Tail | None = None) -> tuple[Tensor, States]:
        """The result and the states. With a tail, of the last step and what stands behind this body, as one."""
        states: States = {}
        at = 0
        while at < len(self._plan):
            name, wanted, outputs, split = self._plan[at]
            dead = self._dying[at]
            steps = self._together(at)
            if steps:
                y, state = self._run_together(at, steps, env, call)
                *_, outputs, split = self._plan[at + len(steps) - 1]
                dead = tuple(v for each in self._dying[at : at + len(steps)] for v in each)
            else:
                child = self._modules[name]
                assert child is not None
                tensors = [env[v] for v in wanted]
                if tail and at == len(self._plan) - 1:
                    y, state = child._finish(tensors, call.into(name), *tail)  # type: ignore[operator]
                else:
                    y, state = _called(child, tensors, call.into(name), name, self._body.nodes[at])
            if state:
                states[name] = state
            at += len(steps) or 1
            if split:
                env.update(zip(outputs, y.split(split, self._axes[at - 1]), strict=True))
            else:
                env[outputs[0]] = y
            for value in dead:
                env.pop(value, None)
        return env[self._body.result], states

    def _together(self, at: int) -> list[Any]:
        """The steps from here on that run as one, if nobody looks at one of them or has put something in its place."""
        if at not in self._fused or nn.modules.module._has_any_global_hook():
            return []
        steps = [self._modules[node.name] for node in self._fused[at].nodes]
        return steps if all(map(_as_made, steps, self._fused[at].nodes)) else []

    def _run_together(self, at: int, steps: list[Any], env: dict[int, Tensor], call: Call) -> tuple[Tensor, States]:
        behind: list[Part] = []
        for more, step in enumerate(steps[1:], 1):
            _, *rest = self._plan[at + more][1]  # the main input is on its way
            behind.append((step.op, step.own(call), [None, *(env[v] for v in rest)]))
        name, wanted, *_ = self._plan[at]
        tensors = [env[v] for v in wanted]
        done: tuple[Tensor, States] = steps[0]._finish(tensors, call.into(name), self._fused[at], behind)
        return done

    def _get_name(self) -> str:
        return self._label or "Body"


def _as_made(step: nn.Module | None, node: Node) -> bool:
    """Whether it is the step that was built, and of a block its last one too, and nobody looks at it."""
    while type(step) is Block and node.kind == "block" and not hooked(step):
        node = node.bodies[""].nodes[-1]
        step = step._modules[node.name]
    return type(step) is Primitive and type(step.op) is type(node.op) and not hooked(step)


def _handed(node: Node) -> tuple[int, ...]:
    """What has ports is handed their values in order (a value may be on two); a combinator what its bodies read."""
    if node.kind in ("op", "block"):
        return tuple(v for values in node.inputs.values() for v in values)
    return reads(node)


def _dying(body: Graph, plan: list[Any]) -> list[tuple[int, ...]]:
    """After which step each value is no longer needed: inference then holds only what is still read."""
    last: dict[int, int] = {}
    for at, (_, wanted, outputs, _) in enumerate(plan):
        last |= dict.fromkeys((*wanted, *outputs), at)
    last.pop(body.result, None)
    return [tuple(v for v, when in last.items() if when == at) for at in range(len(plan))]


class Block(Body):
    """A block that somebody defined in YAML."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        body = node.bodies[""]
        super().__init__(body, model, path, skip, node.verb)
        # a block's body is closed, with values of its own for what it is handed; it may serve many layers
        self._wanted = (body.input, *body.ports.values()) if node.kind == "block" else reads(node)

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        return self._run(dict(zip(self._wanted, tensors, strict=True)), call)

    def _finish(self, tensors: list[Tensor], call: Call, fused: Fused, behind: list[Part]) -> tuple[Tensor, States]:
        return self._run(dict(zip(self._wanted, tensors, strict=True)), call, (fused, behind))


class Residual(Block):
    """x + steps(x); while training, a sample may skip the branch."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__(node, model, path, skip)
        self._drop_path: float = node.arguments.drop_path

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        y, states = super().forward(*tensors, call=call)
        if self._drop_path and call.training:
            keep = 1 - self._drop_path
            shape = (y.shape[0],) + (1,) * (y.ndim - 1)
            y = y * (torch.rand(shape, device=y.device, dtype=torch.float32) < keep).to(y.dtype) / keep
        return tensors[0] + y, states

    def extra_repr(self) -> str:
        return f"drop_path={self._drop_path:g}" if self._drop_path else ""


class Repeat(nn.Module):
    """Layers one after the other; each is called by its index, `model.blocks[0]` too."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__()
        self._wanted = reads(node)
        self._layers = {label: (body.input, _entering(body)) for label, body in node.bodies.items()}
        for label, body in node.bodies.items():
            self._modules[label] = Layer(body, model, graph.join(path, label), skip)

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        env = dict(zip(self._wanted, tensors, strict=True))
        x, states = tensors[0], {}
        for label, (value, wanted) in self._layers.items():
            outer = {**env, value: x}
            x, state = _called(self._modules[label], [outer[v] for v in wanted], call.into(label), label)
            if state:
                states[label] = state
        return x, states

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> Any:
        """A layer, or the list of those of a slice, as nn.ModuleList counts them."""
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Put something in the place of a layer: a wrapper that hands on what it is called with, or what maps x."""
        self.register_module(list(self._modules)[index], layer)

    def __repr__(self) -> str:
        groups: dict[str, list[str]] = {}
        for label, layer in self._modules.items():
            groups.setdefault(repr(layer), []).append(label)
        lines: list[str] = []
        for text, labels in groups.items():
            head = f"({', '.join(_abridged(labels))})" + (f": {len(labels)} x" if len(labels) > 1 else ":")
            lines += f"{head} {text}".splitlines()
        return "\n".join(["repeat(", *("  " + line for line in lines), ")"])


def _abridged(labels: list[str]) -> list[str]:
    return labels if len(labels) < 5 else [*labels[:2], "…", labels[-1]]


def _entering(body: Graph) -> tuple[int, ...]:
    """The values that a layer is handed, its input first."""
    return tuple(dict.fromkeys((body.input, *body.captures)))


class Layer(Body):
    """One iteration of a repeat, or a branch of a parallel."""

    def __init__(self, body: Graph, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__(body, model, path, skip, "steps")
        self._wanted = _entering(body)

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        return self._run(dict(zip(self._wanted, tensors, strict=True)), call)


class Parallel(nn.Module):
    """Branches on one input, merged."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__()
        self._wanted, self._merge = reads(node), node.arguments.merge
        self._axis = node.type.feature_axis if len(node.bodies) > 1 and node.type else -1
        self._branches = {label: _entering(body) for label, body in node.bodies.items()}
        for label, body in node.bodies.items():
            self._modules[label] = Layer(body, model, graph.join(path, label), skip)

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        env = dict(zip(self._wanted, tensors, strict=True))
        results, states = [], {}
        for label, wanted in self._branches.items():
            y, state = _called(self._modules[label], [env[v] for v in wanted], call.into(label), label)
            results.append(y)
            if state:
                states[label] = state
        return merged(results, self._merge, self._axis), states

    def _get_name(self) -> str:
        return "parallel"

    def extra_repr(self) -> str:
        return f"merge={self._merge}"


def merged(results: list[Tensor], how: str, axis: int = -1) -> Tensor:
    """Several results as one: sum, mean, product, concat (along `axis`, that of the features)."""
    if len(results) == 1:
        return results[0]
    if how == "concat":
        return torch.cat(results, axis)
    total = results[0]
    for y in results[1:]:
        total = total * y if how == "product" else total + y
    return total / len(results) if how == "mean" else total


class Holder(nn.Module):
    """A name under which parameters are stored."""


class Scan(Block):
    """The steps in another order, or in several whose results are merged, with all parameters shared."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__(node, model, path, skip)
        self._describe(node, model)

    def _describe(self, node: Node, model: ModelSpec) -> None:
        self._orders: tuple[str, ...] = node.arguments.orders
        self._merge: str = node.arguments.merge
        self._sequences = [_is_sequence(model.types[v]) for v in self._wanted]
        self._in_place = _reversible(node.bodies[""])

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        results: list[Tensor] = []
        states: States = {}
        for order in self._orders:
            inner, ordered = self._entering(order, tensors, call)
            y, states = self._one(order, ordered, inner)
            results.append(self._leaving(order, y, call))
        return merged(results, self._merge), states

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        """Run one direction on tensors that are in its order."""
        return self._run(dict(zip(self._wanted, tensors, strict=True)), call)

    def _entering(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Call, tuple[Tensor, ...]]:
        if order.startswith("columns"):
            if call.resets is not None:
                raise RunError(f"resets have no meaning in the order {order}")
            rows, columns = call.grid_of(tensors[0])
            tensors = self._each(tensors, lambda x: _transposed(x, rows, columns))
            call = replace(call, grid=Grid((columns, rows)))
        if not order.endswith("reverse"):
            return call, tensors
        resets = _reversed_resets(call.resets)
        if self._in_place:
            return replace(call, reverse=True, resets=resets), tensors
        resets = None if resets is None else resets.flip(1)
        return replace(call, resets=resets), self._each(tensors, lambda x: x.flip(1))

    def _leaving(self, order: str, y: Tensor, call: Call) -> Tensor:
        if order.endswith("reverse") and not self._in_place:
            y = y.flip(1)
        if order.startswith("columns"):
            rows, columns = call.grid_of(y)
            y = _transposed(y, columns, rows)
        return y

    def _each(self, tensors: tuple[Tensor, ...], change: Any) -> tuple[Tensor, ...]:
        return tuple(change(x) if seq else x for x, seq in zip(tensors, self._sequences, strict=True))

    def extra_repr(self) -> str:
        many = f", merge={self._merge}" if len(self._orders) > 1 else ""
        return f"order={'+'.join(self._orders)}{many}"


class SeparateScan(Scan):
    """Several orders that share no parameter: each is a child that runs all steps."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        nn.Module.__init__(self)
        self._label, self._wanted = "scan", reads(node)
        body = node.bodies[""]
        self._read_inside = _entering(body)
        for name in node.directions:
            self._modules[name] = Layer(body, model, graph.join(path, name), skip)
        self._describe(node, model)

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        values = dict(zip(self._wanted, tensors, strict=True))
        name = graph.direction_name(order)
        return _called(self._modules[name], [values[v] for v in self._read_inside], call, name)


class PartlySharedScan(Scan):
    """Several orders that share some parameters: what an order owns is held by a child that bears its name."""

    def __init__(self, node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> None:
        super().__init__(node, model, path, skip | {graph.join(path, name) for name in node.owned})
        for name in node.directions:
            self._modules[name] = _holder(node)
        self._holders = {graph.join(path, step): step for step in _steps_of(node)}

    def _one(self, order: str, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, States]:
        own = self.get_submodule(graph.direction_name(order))
        owned = {path: own.get_submodule(step) for path, step in self._holders.items()}
        return super()._one(order, tensors, replace(call, owned=owned))


def _scan(node: Node) -> type[Scan]:
    """The kind of module for a scan, by what its orders share."""
    if not (node.directions and node.owned):
        return Scan
    inside = {item.name for item in graph.parameters(node.bodies[""])}
    return SeparateScan if node.owned == inside else PartlySharedScan


def _steps_of(node: Node) -> list[str]:
    """Paths, inside the scan, of the steps that own something."""
    return sorted({name.rpartition(".")[0] for name in node.owned})


def _holder(node: Node) -> Holder:
    """The owned parameters of one direction, under the names of their steps."""
    root = Holder()
    for item in graph.parameters(node.bodies[""]):
        if item.name in node.owned:
            place: nn.Module = root
            *steps, leaf = item.name.split(".")
            for step in steps:
                if step not in place._modules:
                    place._modules[step] = Holder()
                place = place._modules[step]  # type: ignore[assignment]
            place.register_parameter(leaf, nn.Parameter(torch.empty(item.parameter.shape)))
    return root


def _is_sequence(wire: Wire | None) -> bool:
    return wire is not None and wire.kind in ("sequence", "tokens")


def _reversible(body: Graph) -> bool:
    """Whether every step computes the reverse order itself, so that nothing need be flipped."""
    return all(
        node.kind != "scan" and (node.op is None or (node.op.reads == "token" and not node.state) or node.op.reversible)
        for node in graph.walk(body)
    )


def _reversed_resets(resets: Tensor | None) -> Tensor | None:
    """Marks of first tokens as seen from the right: t comes first if t + 1 begins another sequence."""
    if resets is None:
        return None
    return torch.cat([resets[:, 1:], torch.zeros_like(resets[:, :1])], 1)


def _transposed(x: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens of a grid, row by row -> column by column."""
    pattern = "batch (rows columns) features -> batch (columns rows) features"
    return rearrange(x, pattern, rows=rows, columns=columns)


_KINDS: dict[str, Any] = {"block": Block, "residual": Residual, "repeat": Repeat, "parallel": Parallel}


def make(node: Node, model: ModelSpec, path: str, skip: frozenset[str]) -> nn.Module:
    """The module of a node; parameters named in `skip` are held elsewhere."""
    if node.kind == "op":
        return Primitive(node, path, model.types, skip)
    kind = _scan(node) if node.kind == "scan" else _KINDS[node.kind]
    made: nn.Module = kind(node, model, path, skip)
    made._type = node.type  # type: ignore[assignment]  # what its output was checked to be
    return made
