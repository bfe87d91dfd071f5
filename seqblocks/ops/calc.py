"""A formula over wires, numbers and learned scalars, computed feature by feature."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

from seqblocks.errors import Fault, quote
from seqblocks.language.formulas import PartFault, Program, compiled, names_in, parse
from seqblocks.language.keys import namespace_of
from seqblocks.op import FLOATS, Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter, read_init
from seqblocks.roles import Split
from seqblocks.tape import Tape, Value, broadcast
from seqblocks.token_function import TokenFunction
from seqblocks.types import UNBOUNDED, Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

T = TypeVar("T")  # what a formula computes: tensors, or facts about them
X = Port("x", "the wire that a formula calls `x`", main=True, kinds=FLOATS, broadcast=True)


class _Ports:
    """The ports of a formula: the wires in it, in the order of the text. Those of the class: only `x`."""

    def __get__(self, op: Calc | None, owner: type[Calc]) -> tuple[Port, ...]:
        if op is None:
            return (X,)
        return tuple(map(_port, op.wires()))


@lru_cache(maxsize=1024)
def _port(name: str) -> Port:
    return X if name == X.name else X._replace(name=name, main=False)


@primitive("calc")
class Calc(Op):
    """Compute formulas over wires, numbers and learned scalars: `calc: {y: "a - lam * b", z: "tanh(y)"}`.

    Each key names the result of its formula, and later formulas can use it. `calc: "2 * x"` leaves the result
    unnamed. In a formula, a name is a wire, a learned scalar, or a number in scope, and `x` is the wire that the step
    reads, unless there is a wire with that name. The operators are + - * / **, with parentheses, and the functions
    exp, log, log2, sqrt, abs, sin, cos, tanh, sigmoid, softplus, min and max.
    """

    names_results = True
    ports = _Ports()
    formula: str = argument(..., "the only formula, if its result has no name")
    learned: dict[str, Any] = argument({}, "learned scalars: a name, and an initial value or an initialiser for each")

    def wires(self) -> list[str]:
        """Return the names of the wires in the formula."""
        return [name for name in _names(self.formula) if name not in self.learned]

    def shape(self, *wires: Wire) -> Wire:
        made = result(parse(self.formula), dict(zip(self.wires(), wires, strict=True)))
        assert made
        return made

    def facts(self, *wires: Wire) -> Facts:
        return _bounds(program_of(self.formula), dict(zip(self.wires(), wires, strict=True)))

    def parameters(self, *wires: Wire) -> dict[str, Parameter]:
        learned = self.learned.items()
        return {namespace_of(name): Parameter((1,), _initialiser(value), decay=False) for name, value in learned}

    def macs(self, *wires: Wire) -> int:
        widths = {name: wire.features for name, wire in zip(self.wires(), wires, strict=True)}
        return _products(program_of(self.formula), widths)[1]

    def splits(self, ranks: int, *wires: Wire) -> list[Split]:
        """Split by features. Each rank has the learned scalars, and wires of a width of 1, as a whole."""
        width = max(wire.features for wire in wires)
        wide = [name for name, wire in zip(self.wires(), wires, strict=True) if wire.features == width]
        return [Split(self, tuple(wide))] if width > 1 else []

    def memory(self, tape: Tape, p: Mapping[str, Value], *inputs: Value) -> Value:
        return computed(program_of(self.formula), self._values(p, inputs), partial(recorded, tape))

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        program = program_of(self.formula)
        return TokenFunction(lambda *inputs: computed(program, self._values(p, inputs), applied))

    def forward(self, p: Mapping[str, Tensor], call: Call, *inputs: Tensor) -> Tensor:
        return computed(program_of(self.formula), self._values(p, inputs), applied)

    def _values(self, p: Mapping[str, T], inputs: tuple[T, ...]) -> dict[str, T]:
        """Return the tensors by name."""
        names = [name for name in _names(self.formula) if name not in self.learned]
        return {**dict(zip(names, inputs, strict=True)), **{name: p[namespace_of(name)] for name in self.learned}}


def _initialiser(value: float | str) -> Init:
    if isinstance(value, str):
        init = read_init(value, {})
        assert init
        return init
    return Init("constant", (float(value),))


@lru_cache(maxsize=1024)
def _parsed(formula: str) -> tuple[tuple[str, ...], Program]:
    tree = parse(formula)
    return tuple(dict.fromkeys(node.id for node in names_in(tree))), compiled(tree)


def _names(formula: str) -> tuple[str, ...]:
    """Return the names in a formula, once each, in the order of the text."""
    return _parsed(formula)[0]


def program_of(formula: str) -> Program:
    return _parsed(formula)[1]


_names._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers call it instead of tracing the parser
program_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- types ------------------------------------------------------------------------------------------------------------


def result(tree: ast.expr, wires: Mapping[str, Wire]) -> Wire | None:
    """Return the type of a part of a formula; None for numbers and learned scalars. Raises PartFault (E402, E406)."""
    match tree:
        case ast.Name(id=name):
            return wires.get(name)
        case ast.UnaryOp(operand=operand):
            return _pointwise(result(operand, wires))
        case ast.BinOp(left=left, right=right):
            return _combined(tree, left, right, wires)
        case ast.Call(args=[first, *others]):
            made, last = _pointwise(result(first, wires)), first
            for other in others:
                made = _merged(tree, (last, made), (other, result(other, wires)), wires)
                last = other
            return made
    return None


def _pointwise(wire: Wire | None) -> Wire | None:
    return wire and wire.with_features(wire.features)


def _combined(tree: ast.expr, left: ast.expr, right: ast.expr, wires: Mapping[str, Wire]) -> Wire | None:
    return _merged(tree, (left, result(left, wires)), (right, result(right, wires)), wires)


_Operand = tuple[ast.expr, Wire | None]


def _merged(tree: ast.expr, a: _Operand, b: _Operand, wires: Mapping[str, Wire]) -> Wire | None:
    """Return the type of two operands that are broadcast. Raises PartFault (E402, E406)."""
    (left, x), (right, y) = a, b
    if x is None or y is None:
        return _pointwise(x or y)
    if "vector" not in (x.kind, y.kind) and (x.kind, x.places) != (y.kind, y.places):
        code, what = "E406", "tokens"
        expected = "the same tokens in both, or a vector, which is combined with each token"
    elif x.features != y.features and 1 not in (x.features, y.features):
        code, what = "E402", "widths"
        expected = "the same width in both, or a width of 1"
    else:
        return (y if x.kind == "vector" else x).with_features(max(x.features, y.features))
    found = f"{ast.unparse(left)} {x} and {ast.unparse(right)} {y}"
    read = dict.fromkeys(name.id for part in (left, right) for name in names_in(part) if name.id in wires)
    notes = tuple(note for name in read if (note := wires[name].origin_note(f"`{name}`")))[:3]
    message = f"{quote(ast.unparse(tree))} combines wires with different {what}"
    raise PartFault(Fault(code, message, expected=expected, found=found, notes=notes), right)


def _products(program: Program, widths: Mapping[str, int]) -> tuple[int, int]:
    """Return the width of a part of a formula, and its products, quotients and powers for one token."""
    name, *parts = program
    if name in ("name", "number"):
        return widths.get(parts[0], 1), 0
    found = [_products(part, widths) for part in parts]
    width = max(width for width, _ in found)
    return width, sum(products for _, products in found) + width * (name in ("*", "/", "**"))


_MONOTONIC: dict[str, Callable[[float], float]] = {
    "exp": lambda x: math.exp(x) if x < 700 else math.inf,
    "tanh": math.tanh,
    "sigmoid": lambda x: (1 + math.tanh(x / 2)) / 2,
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "sqrt": lambda x: math.sqrt(max(x, 0.0)),
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "log2": lambda x: math.log2(x) if x > 0 else -math.inf,
}


def _bounds(program: Program, wires: Mapping[str, Wire]) -> Facts:
    """Return bounds of the values of a part of a formula."""
    name, *parts = program
    if name == "name":
        return wires[parts[0]].facts.range if parts[0] in wires else UNBOUNDED
    if name == "number":
        return Facts(parts[0], parts[0])
    a, *others = [_bounds(part, wires) for part in parts]
    b = others[0] if others else None
    if name in _MONOTONIC:
        return Facts(_MONOTONIC[name](a.low), _MONOTONIC[name](a.high))
    if name in ("min", "max"):
        pick = min if name == "min" else max
        return Facts(pick(each.low for each in (a, *others)), pick(each.high for each in (a, *others)))
    match name:
        case "+" if b:
            return a.plus(b)
        case "*" if b:
            return a.times(b)
        case "-":
            return a.plus(Facts(-b.high, -b.low)) if b else Facts(-a.high, -a.low)
        case "abs" | "**" if name == "abs" or parts[1] in (("number", 2), ("number", 2.0)):
            return Facts(0.0)
        case "sin" | "cos":
            return Facts(-1.0, 1.0)
    return UNBOUNDED


# --- computation ------------------------------------------------------------------------------------------------------


def computed(program: Program, values: Mapping[str, T], apply: Callable[..., T]) -> T:
    """Compute a part of a formula. apply: computes an operator or function of its name and operands."""
    name, *parts = program
    if name == "name":
        return values[parts[0]]
    if name == "number":
        number: T = parts[0]
        return number
    return apply(name, *[computed(part, values, apply) for part in parts])


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add, "*": operator.mul, "/": operator.truediv, "**": operator.pow,
}  # fmt: skip


def applied(name: str, a: Any, *others: Any) -> Any:
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](a, *others)
    if name == "-":
        return a - others[0] if others else -a
    if name in ("min", "max"):
        return reduce(_lower if name == "min" else _higher, others, a)
    import torch

    return torch.nn.functional.softplus(a) if name == "softplus" else getattr(torch, name)(a)


def _lower(a: Any, b: Any) -> Any:
    if isinstance(a, int | float):
        a, b = b, a
    return a.clamp(max=b) if isinstance(b, int | float) else a.minimum(b)


def _higher(a: Any, b: Any) -> Any:
    if isinstance(a, int | float):
        a, b = b, a
    return a.clamp(min=b) if isinstance(b, int | float) else a.maximum(b)


def recorded(tape: Tape, name: str, a: Value, *others: Any) -> Value:
    """Record what an operator or a function keeps for the backward pass."""
    if name in ("min", "max") and len(others) > 1:
        return reduce(partial(recorded, tape, name), others, a)
    b = others[0] if others else None
    numbers = [isinstance(each, int | float) for each in (a, b)]
    if b is None:
        keeps = {"-": (), **dict.fromkeys(("exp", "sqrt", "tanh", "sigmoid"), ("output",))}
        return tape.unary(a, keeps.get(name, ("input",)))
    if any(numbers):
        x = b if numbers[0] else a
        if name == "/" and numbers[0]:
            return tape.unary(tape.inverse(x), ())
        if name == "**":
            return tape.unary(x, ("output",) if numbers[0] else ("input",))
        return tape.unary(x, ("input",) if name in ("min", "max") else ())
    match name:
        case "+" | "-":
            return tape.add(a, b)
        case "*":
            return tape.multiply(a, b)
        case "/":
            return tape.divide(a, b)
    y = tape.new(broadcast(a.shape, b.shape), max(a.item, b.item))
    if name == "**":  # torch computes logarithms and powers anew for the gradients
        tape.function([a, b], [y], [a, b, y], 4 * y.bytes + y.numbers)
    else:  # the backward pass halves the gradient where both are equal, and makes masks of a byte each
        tape.function([a, b], [y], [a, b], y.bytes + 2 * y.numbers)
    return y
