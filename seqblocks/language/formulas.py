"""Parse formulas over wires: `a - lam * b`, `x * sigmoid(gate) / sqrt(dim)`.

A formula has the syntax of an expression (`expressions.py`). Its parts without wires and learned scalars are
expressions, and are replaced by their values; in the other parts, only arithmetic and some functions are allowed.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Mapping
from typing import Any

from seqblocks.errors import Fault, listing, quote
from seqblocks.language.expressions import (
    FUNCTIONS,
    MAX_LENGTH,
    MAX_NODES,
    UNKNOWN,
    byte_to_character,
    checked,
    notation,
    syntax_tree,
)
from seqblocks.suggestions import did_you_mean

OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**",
}  # fmt: skip
POINTWISE = ("exp", "log", "log2", "sqrt", "abs", "sin", "cos", "tanh", "sigmoid", "softplus")
SEVERAL = ("min", "max")  # functions of 2 to 8 arguments
OF_WIRES = (*POINTWISE, *SEVERAL)
_OTHER_NAMES = {
    "minimum": "min", "maximum": "max", "ln": "log", "rsqrt": "1 / sqrt", "square": "x ** 2", "neg": "-x",
    "relu": "max(x, 0)", "silu": "x * sigmoid(x)",
}  # fmt: skip


class PartFault(Fault):
    """A fault of one part of a formula, `part` of its syntax tree."""

    def __init__(self, fault: Fault, part: ast.expr) -> None:
        super().__init__(fault.code, fault.message, expected=fault.expected, found=fault.found, hint=fault.hint)
        self.notes, self.part = fault.notes, part

    def place(self, text: str) -> tuple[int, int] | None:
        """Return offset and length of the part in the text of the formula; None if it has several lines."""
        part = self.part
        if part.lineno != 1 or part.end_lineno != 1 or part.end_col_offset is None:
            return None
        first, last = (byte_to_character(text, offset) for offset in (part.col_offset, part.end_col_offset))
        return first, last - first


def parse(text: str) -> ast.expr:
    """Return the syntax tree of a formula, without checking its parts. Raises Fault (E501, E504)."""
    if len(text) > MAX_LENGTH:
        raise Fault("E504", "the formula is too long", expected=f"at most {MAX_LENGTH} characters")
    tree = syntax_tree(text)
    if sum(1 for _ in ast.walk(tree)) > 2 * MAX_NODES:
        raise Fault("E504", "the formula is too complex", hint="compute parts of it first, under names of their own")
    return tree


def names_in(tree: ast.expr) -> list[ast.Name]:
    """Return the names in a formula in the order of the text, without those of functions."""
    if isinstance(tree, ast.Name):
        return [tree]
    nodes = [*ast.walk(tree)]
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in functions]
    return sorted(names, key=lambda node: (node.lineno, node.col_offset))


def fold(text: str, tree: ast.expr, tensors: Container[str], numbers: Mapping[str, Any]) -> ast.expr | None:
    """Return the tree with numbers in place of the parts that contain no tensors; None if a number is UNKNOWN.

    tensors: the names of wires and learned scalars. numbers: the values of other names. Raises Fault and PartFault.
    """
    if not any(node.id in tensors for node in names_in(tree)):
        written = ast.get_source_segment(text.strip(), tree) or ast.unparse(tree)
        value = checked(written, tree).evaluate(numbers)
        if value is UNKNOWN:
            return None
        if isinstance(value, bool):
            raise PartFault(Fault("E203", "expected a number", found=quote(written)), tree)
        return ast.copy_location(ast.Constant(value), tree)
    parts = _parts(text, tree)
    folded = [fold(text, part, tensors, numbers) for part in parts]
    if any(part is None for part in folded):
        return None
    made = _with_parts(tree, [part for part in folded if part])
    if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Div) and _is_zero(made.right):
        raise PartFault(Fault("E502", f"{quote(text)} divides by zero"), parts[1])
    return ast.copy_location(made, tree)


def _is_zero(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value == 0


def _parts(text: str, tree: ast.expr) -> list[ast.expr]:
    """Return the operands of a part that contains wires. Raises PartFault if it is not arithmetic."""
    match tree:
        case ast.Name():
            return []
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            return [tree.left, tree.right]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return [tree.operand]
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            _check_call(tree, name)
            return tree.args
    expected = f"+ - * / **, parentheses, or {listing(OF_WIRES, len(OF_WIRES))}"
    fault = Fault("E501", "wires cannot be computed like this", expected=expected, hint=notation(text))
    raise PartFault(fault, tree)


def _check_call(call: ast.Call, name: str) -> None:
    if name not in OF_WIRES:
        instead = _OTHER_NAMES.get(name)
        message = f"{name} is a function of numbers, not of wires" if name in FUNCTIONS else None
        fault = Fault(
            "E303", message or f"there is no function {quote(name)} of wires",
            expected=f"one of {listing(OF_WIRES, len(OF_WIRES))}",
            hint=lambda: f"write {quote(instead)}" if instead else did_you_mean(name, OF_WIRES),
        )  # fmt: skip
        raise PartFault(fault, call.func)
    least, most = FUNCTIONS[name][1:]
    if not least <= len(call.args) <= most:
        count = f"{least} argument{'s' if least > 1 else ''}" if least == most else f"{least} to {most} arguments"
        raise PartFault(Fault("E501", f"{name} takes {count}", found=f"{len(call.args)}"), call)


def _with_parts(tree: ast.expr, parts: list[ast.expr]) -> ast.expr:
    match tree:
        case ast.BinOp(op=op):
            return ast.BinOp(parts[0], op, parts[1])
        case ast.UnaryOp(op=op):
            return ast.UnaryOp(op, parts[0])
        case ast.Call(func=func):
            return ast.Call(func, parts, [])
    return tree


Program = tuple[Any, ...]
"""A folded formula: ("name", name), ("number", value), or an operator or function with the programs of its operands."""


def compiled(tree: ast.expr) -> Program:
    """Return a folded formula as a program."""
    match tree:
        case ast.Name(id=name):
            return ("name", name)
        case ast.Constant(value=value):
            return ("number", value)
        case ast.BinOp(left=left, op=op, right=right):
            return (OPERATORS[type(op)], compiled(left), compiled(right))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return ("number", -value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ("-", compiled(operand))
        case ast.UnaryOp(operand=operand):
            return compiled(operand)
        case ast.Call(func=ast.Name(id=name), args=args):
            return (name, *map(compiled, args))
    raise AssertionError(tree)
