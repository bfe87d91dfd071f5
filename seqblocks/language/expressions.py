"""Evaluate arithmetic expressions: `2 * inner`, `round_up(expand * dim, 64)`, `0.1 * layer / max(layers - 1, 1)`.

An expression is parsed to a Python syntax tree, checked against a short list of allowed nodes, and turned into
nested functions. It is never passed to `eval`, and its size, depth and magnitude are limited.

A value may be `UNKNOWN`: it was invalid, or it is an argument without a value in an unused block. Every expression
that uses an UNKNOWN value is UNKNOWN.
"""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from seqblocks.errors import Fault, listing, quote
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

MAX_LENGTH = 400
MAX_NODES = 100
MAX_MAGNITUDE = 10**18

Number = int | float
Compute = Callable[[Mapping[str, Any]], Any]  # computes a value from those of the names

RESERVED = frozenset(("and", "or", "not", "if", "else", "True", "False", "None", "await", "yield"))
"""Words that are never names."""

# Other keywords of Python may be names here. Python parses a stand-in of as many bytes, so that offsets stay the same:
# its last two letters become one letter of two bytes, which names cannot contain.
_STAND_INS = {word: word[:-2] + chr(0x250 + at) for at, word in enumerate(sorted({*keyword.kwlist} - RESERVED))}
_NAMES = {stand_in: word for word, stand_in in _STAND_INS.items()}


class _Unknown:
    """The type of `UNKNOWN`, the value of anything invalid or not given."""

    def __repr__(self) -> str:
        return "?"

    def __deepcopy__(self, memo: object) -> _Unknown:
        return self


UNKNOWN = _Unknown()


def _divide(a: Number, b: Number) -> Number:
    quotient = a / b
    # exact quotients of integers stay integers, so that 384 / 2 is a valid width
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else quotient


def _power(a: Number, b: Number) -> Number:
    if abs(b) > 64 or (b < 0 and a == 0):
        raise OverflowError
    result: Number = a**b
    if isinstance(result, complex):
        raise ValueError("a root of a negative number")
    return result


def _sqrt(value: Number) -> float:
    if value < 0:
        raise ValueError("a root of a negative number")
    return math.sqrt(value)


def _log2(value: Number) -> float:
    if value <= 0:
        raise ValueError("a logarithm of a number that is not positive")
    return math.log2(value)


def _log(value: Number) -> float:
    if value <= 0:
        raise ValueError("a logarithm of a number that is not positive")
    return math.log(value)


def _sigmoid(value: Number) -> float:
    return (1 + math.tanh(value / 2)) / 2  # exp would overflow


def _softplus(value: Number) -> float:
    return max(value, 0) + math.log1p(math.exp(-abs(value)))


def _round_up(value: Number, multiple: Number) -> int:
    return math.ceil(value / multiple) * _whole(multiple)


def _round_down(value: Number, multiple: Number) -> int:
    return math.floor(value / multiple) * _whole(multiple)


def _hilbert(row: Number, column: Number, side: Number) -> int:
    """Return the place of a token along Hilbert's curve, in the least square with a power of 2 as side, from `side` on.

    Each quarter of the square is filled by a smaller curve, of which the first and the last are turned.
    """
    y, x, least = map(_whole, (row, column, side))
    if least > 2**32:
        raise ValueError(f"the side of Hilbert's square is {least}, more than {2**32}")
    if not (0 <= y < least and 0 <= x < least):
        raise ValueError(f"row {y} and column {x} do not lie in a square with sides of {least}")
    place, size = 0, 1 << (least - 1).bit_length()
    while size > 1:
        size //= 2
        right, below = x >= size, y >= size
        x, y = x % size, y % size
        place = 4 * place + (2 + (not below) if right else int(below))
        if not below:
            x, y = (size - 1 - y, size - 1 - x) if right else (y, x)
    return place


def _whole(value: Number) -> int:
    if value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# name -> (function, fewest arguments, most arguments)
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "floor": (math.floor, 1, 1),
    "round": (round, 1, 1),
    "min": (min, 2, 8),
    "max": (max, 2, 8),
    "sqrt": (_sqrt, 1, 1),
    "log2": (_log2, 1, 1),
    "exp": (math.exp, 1, 1),
    "log": (_log, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tanh": (math.tanh, 1, 1),
    "sigmoid": (_sigmoid, 1, 1),
    "softplus": (_softplus, 1, 1),
    "len": (len, 1, 1),
    "round_up": (_round_up, 2, 2),
    "round_down": (_round_down, 2, 2),
    "hilbert": (_hilbert, 3, 3),
}


class Expression(Record):
    """A checked syntax tree, and the names in it with their offsets as Python counts them."""

    text: str
    tree: ast.expr
    names: tuple[tuple[str, int], ...]

    def check_names(self, names: Mapping[str, Any]) -> None:
        """Raise Fault (E303) for an unknown name."""
        for name, offset in self.names:
            if name not in names:
                raise unknown_name(name, names, byte_to_character(self.text, offset))

    def evaluate(self, names: Mapping[str, Any], is_condition: bool = False) -> Any:
        """Return the value, or UNKNOWN if a name is UNKNOWN. Raises Fault (E303, E502, E503, E504).

        is_condition: return whether it is true. Numbers other than 0 are true; words raise Fault (E502).
        """
        self.check_names(names)
        if UNKNOWN in [names[name] for name, _ in self.names]:
            return UNKNOWN
        try:
            value = self._condition(names) if is_condition else self._value(names)
        except _UnknownEntry:
            return UNKNOWN
        except ZeroDivisionError:
            hint = "use max(…, 1) to avoid dividing by 0"
            raise Fault("E502", f"{quote(self.text)} divides by zero", hint=hint) from None
        except OverflowError:
            raise Fault("E504", f"{quote(self.text)} is too large a number") from None
        except TypeError:
            raise Fault("E502", f"{quote(self.text)} has no value: it compares a word with a number") from None
        except ValueError as error:
            raise Fault("E502", f"{quote(self.text)} has no value: {error}") from None
        if isinstance(value, (int, float)) and not abs(value) <= MAX_MAGNITUDE:
            raise Fault("E504", f"{quote(self.text)} is too large a number", expected="at most 10^18")
        return value

    @cached_property
    def _value(self) -> Compute:
        return (_entry if isinstance(self.tree, ast.Subscript) else _number)(self.tree)

    @cached_property
    def _condition(self) -> Compute:
        return _flag(self.tree)

    def bound(self, names: Mapping[str, Number]) -> str:
        """Return the expression as text, with numbers in place of these names."""
        return ast.unparse(_Bind(names).visit(deepcopy(self.tree)))


class _Bind(ast.NodeTransformer):
    """Replace names by numbers."""

    def __init__(self, names: Mapping[str, Number]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.names[node.id]) if node.id in self.names else node


class NameFault(Fault):
    """An unknown name at `offset` in the text of the expression."""

    def __init__(self, fault: Fault, name: str, offset: int) -> None:
        super().__init__(fault.code, fault.message, expected=fault.expected, hint=fault.hint)
        self.name, self.offset = name, offset


def unknown_name(name: str, known: Mapping[str, Any], offset: int) -> NameFault:
    """Return the fault of a name that is not in scope. known: the names in scope, which may be many."""

    def expected() -> str:
        return f"one of {listing(sorted(known))}" if known else "a number"

    def hint() -> str | None:
        return f"{name} is a function: {name}(…)" if name in FUNCTIONS else did_you_mean(name, known)

    return NameFault(Fault("E303", f"unknown name {quote(name)}", expected=expected, hint=hint), name, offset)


def byte_to_character(text: str, offset: int) -> int:
    """Return the offset of a character in the text from that of its byte in the stripped text, which Python counts."""
    stripped = text.lstrip()
    return len(text) - len(stripped) + len(stripped.encode()[:offset].decode(errors="ignore"))


def _number(node: ast.expr) -> Compute:
    """Return the function that computes a part of an expression. A formula of many features calls it for each."""
    match node:
        case ast.Constant(value=constant):
            return lambda names: constant
        case ast.Name() | ast.Subscript():
            read = _entry(node)
            return lambda names: _checked(read(names), node)
        case ast.BinOp(left=left, op=op, right=right):
            binary, a, b = _BINARY[type(op)], _number(left), _number(right)
            return lambda names: _bounded(binary(a(names), b(names)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            flag = _flag(operand)
            return lambda names: not flag(names)
        case ast.UnaryOp(op=op, operand=operand):
            unary, a = _UNARY[type(op)], _number(operand)
            return lambda names: unary(a(names))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            compare, a, b = _COMPARE[type(op)], _any(left), _any(right)
            return lambda names: compare(a(names), b(names))
        case ast.BoolOp(op=op, values=values):
            gather, flags = all if isinstance(op, ast.And) else any, [*map(_flag, values)]
            return lambda names: gather(flag(names) for flag in flags)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            flag, a, b = _flag(test), _number(body), _number(orelse)
            return lambda names: a(names) if flag(names) else b(names)
        case ast.Call(func=ast.Name(id=name), args=args):
            function, reads = FUNCTIONS[name][0], [*map(_list if name == "len" else _number, args)]
            return lambda names: _bounded(function(*[read(names) for read in reads]))
    raise AssertionError(node)


def _checked(value: Any, node: ast.expr) -> Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"'{ast.unparse(node)}' is {quote(str(value))}, not a number")
    return value


def _entry(node: ast.expr) -> Compute:
    """Return the value of a name, or an entry of a list that has a name."""
    if isinstance(node, ast.Name):
        return operator.itemgetter(node.id)
    assert isinstance(node, ast.Subscript)
    of, entries, index = node.value, _list(node.value), _number(node.slice)
    return lambda names: _chosen(entries(names), _whole(index(names)), of)


def _chosen(entries: list[Any], index: int, node: ast.expr) -> Any:
    if not -len(entries) <= index < len(entries):
        count = f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}"
        raise ValueError(f"the index is {index}, and '{ast.unparse(node)}' has {count}")
    if entries[index] is UNKNOWN:
        raise _UnknownEntry
    return entries[index]


def _list(node: ast.expr) -> Compute:
    read = _entry(node)

    def entries(names: Mapping[str, Any]) -> list[Any]:
        if isinstance(found := read(names), list):
            return found
        raise ValueError(f"'{ast.unparse(node)}' is {quote(str(found))}, not a list")

    return entries


class _UnknownEntry(Exception):
    """An entry of a list is UNKNOWN."""


def _any(node: ast.expr) -> Compute:
    """Return one side of a comparison: a number, or a name or an entry whose value is a word or a boolean."""
    if not isinstance(node, ast.Name | ast.Subscript):
        return _number(node)
    read = _entry(node)
    return lambda names: value if isinstance(value := read(names), (bool, str)) else _checked(value, node)


def _flag(node: ast.expr) -> Compute:
    """Return a condition. Numbers other than 0 are true."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return _number(node)
    read = _any(node)
    return lambda names: _truth(read(names), node)


def _truth(value: Any, node: ast.expr) -> bool:
    if isinstance(value, str):
        word = quote(value) if isinstance(node, ast.Constant) else f"'{ast.unparse(node)}' is {quote(value)}"
        raise ValueError(f"{word}, neither true nor false: compare it, as in `{ast.unparse(node)} == 'none'`")
    return bool(value)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_MAGNITUDE**2:
        raise OverflowError
    return value


def parse(text: str) -> Expression:
    """Parse an expression. Raises Fault (E501, E504)."""
    found = _parsed(text)
    if isinstance(found, Fault):
        raise found.copy()
    return found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Expression | Fault:
    """Return what `parse` returns or raises, so that an invalid expression in many layers is also parsed only once."""
    try:
        return _parse(text)
    except Fault as fault:
        return fault.copy()


def _parse(text: str) -> Expression:
    if len(text) > MAX_LENGTH:
        raise Fault("E504", "the expression is too long", expected=f"at most {MAX_LENGTH} characters")
    return checked(text, syntax_tree(text))


def checked(text: str, tree: ast.expr) -> Expression:
    """Return a syntax tree as an expression. text: as it is written, for messages. Raises Fault (E303, E501, E504)."""
    names: list[tuple[str, int]] = []
    nodes = list(islice(ast.walk(tree), MAX_NODES * 2 + 2))
    if len(nodes) > MAX_NODES * 2 + 1:
        raise Fault("E504", "the expression is too complex", hint="split it into several entries of `let:`")
    functions = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    equal = (n for n in nodes if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Eq | ast.NotEq))
    compared = {id(n.comparators[0]) for n in equal}
    for node in nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) in compared):
            _check(node, text)  # words may only be compared: order == 'reverse'
        if isinstance(node, ast.Name) and id(node) not in functions:
            names.append((node.id, node.col_offset))
    return Expression(text, tree, tuple(names))


def syntax_tree(text: str) -> ast.expr:
    """Parse text into an unchecked Python syntax tree. Raises Fault (E501)."""
    tree = _tree(text)
    if tree is None:
        raise Fault("E501", f"{quote(text)} is not a valid expression", hint=notation(text))
    return tree


def has_syntax(text: str) -> bool:
    """Return whether `syntax_tree` can parse a text."""
    return _tree(text) is not None


@lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr | None:
    """Return the syntax tree of a text, or None. Keywords of Python are names where they would be syntax errors."""
    if (tree := _parsed_tree(text)) is not None or not (words := _STAND_INS.keys() & re.findall(r"\w+", text)):
        return tree
    tree = _parsed_tree(re.sub(rf"\b(?:{'|'.join(words)})\b", lambda found: _STAND_INS[found[0]], text))
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Name) and node.id in _NAMES:
            node.id = _NAMES[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = re.sub(r"\w+", lambda found: _NAMES.get(found[0], found[0]), node.value)
    return tree


def _parsed_tree(text: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about literals next to keywords, such as "2if"
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


_ALLOWED = (
    ast.Name, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.BoolOp, ast.Load, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip


def _check(node: ast.AST, text: str) -> None:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()):
            return
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            _check_call(name, args)
            return
        case ast.Compare(ops=[op]) if type(op) in _COMPARE:
            return
        case ast.Compare(ops=[_, _, *_]):
            raise _unsupported(text, _pairwise(node))
        case ast.BinOp(op=op) if type(op) not in _BINARY:
            pass
        case ast.UnaryOp(op=op) if type(op) not in (*_UNARY, ast.Not):
            pass
        case _ if isinstance(node, _ALLOWED) or _is_index(node):
            return
    raise _unsupported(text, notation(text))


def _check_call(name: str, args: list[ast.expr]) -> None:
    """Raise Fault (E303, E501) for an unknown function, or arguments that it does not take."""
    if name not in FUNCTIONS:
        message, expected = f"there is no function {quote(name)}", f"one of {listing(FUNCTIONS)}"
        raise Fault("E303", message, expected=expected, hint=lambda: did_you_mean(name, FUNCTIONS))
    _, least, most = FUNCTIONS[name]
    if not least <= len(args) <= most:
        count = str(least) if least == most else f"{least} to {most}"
        raise Fault("E501", f"{name} takes {count} arguments", found=f"{len(args)}")
    if name == "len" and not isinstance(args[0], ast.Name | ast.Subscript):
        raise Fault("E501", "len takes the name of a list", found=quote(ast.unparse(args[0])))


def _is_index(node: ast.AST) -> bool:
    """Return whether a node is an entry of a list: `widths[layer]`, `table[1][0]`."""
    if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Slice | ast.Tuple):
        return False
    return isinstance(node.value, ast.Name | ast.Subscript)


def _unsupported(text: str, hint: str | None) -> Fault:
    expected = "numbers, names, `list[index]`, + - * / // % **, comparisons, and, or, not, `a if c else b`, functions"
    return Fault("E501", f"{quote(text)} uses syntax that expressions do not support", expected=expected, hint=hint)


def _pairwise(node: ast.Compare) -> str:
    """Return the hint for `0 < d < 1`, which is to be written as `0 < d and d < 1`."""
    sides = [node.left, *node.comparators]
    pairs = (ast.Compare(left, [op], [right]) for left, op, right in zip(sides, node.ops, sides[1:], strict=False))
    return f"compare two values at a time: `{' and '.join(map(ast.unparse, pairs))}`"


_NOTATIONS = {
    r"\^": "write `**` for powers",
    r"[{}]": "write names without braces",
    r"^\d+(\.\d+)? ?([kKMGBT]i?|%)$": "write the number in full, without a unit",
    r"^\d{1,3}(,\d{3})+$": "write the number without commas; `1_000` is allowed",
    r"&&|\|\|": "write `and` and `or`",
    r"(?<![=<>!])=(?!=)": "write `==` to compare",
    r"^None$": "leave the key out",
}


def notation(text: str) -> str | None:
    """Return a hint for the notation of another language."""
    return next((hint for pattern, hint in _NOTATIONS.items() if re.search(pattern, text)), None)
