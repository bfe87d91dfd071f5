"""Source text of the functions of a plan.

There are two: one for one token, and one for several tokens, which are read together
(`seqblocks/streaming/frames.py`). Both are made of the same calls, and each line is written for both at once. The only
user input in the text is quoted names: values are constants, which the text refers to by number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.graph import OpNode, is_prefix_join
from seqblocks.kernels.half import HALF_KINDS
from seqblocks.state import States, dtype_of
from seqblocks.state_layout import State
from seqblocks.streaming.token_rows import as_rows, over_tokens
from seqblocks.token_function import TokenFunction

Path = tuple[str, ...]
Values = Mapping[str, Any]  # of constants, by name
Maker = Callable[[Values], Callable[..., Any]]

_VARIABLE = re.compile(r"\bv[0-9]+\b")


class Several(NamedTuple):
    """How a step computes several tokens of each sequence, if they are not independent rows.

    when: a condition in the generated source, such as "tokens <= 8", under which its function for one token is used;
        "" for never.
    together: whether that function takes all tokens in one call (`TokenFunction.several`) or is called for each.
    whole: the name of the function of several tokens that is used otherwise; "" if there is none.
    """

    when: str
    together: bool
    whole: str

    @property
    def is_possible(self) -> bool:
        return bool(self.when or self.whole)


class PlanSource:
    """Builder of the source of a plan's function. Variables are numbered; states are addressed by path.

    dtype: that of the model. What a state holds in 16 bits is a variable in float32, unless it has a place per token.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.splits = True  # whether several tokens can be read
        self.calls_modules = False
        self._lines: list[tuple[str, str]] = []  # for one token, and for several
        self._names: dict[str, Any] = {"cat": torch.cat}
        self._constants: dict[int, str] = {}  # names of constants by the id of the value
        self._prepared: dict[str, Callable[[], Any]] = {}  # functions that return a new value for a constant
        self._joined: dict[str, str] = {}  # variables of concatenated inputs
        self._functions: list[str] = []
        self._count = 0  # variables
        self._given: dict[Path, str] = {(): "state"}  # variables of the given state, by path
        self._made: dict[Path, str] = {}  # variables of the returned state

    def variable(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def add(self, line: str, several: str | None = None) -> None:
        """Add a line. several: the line for several tokens, if it is a different one."""
        self._lines.append((line, line if several is None else several))

    def continue_with_last(self, variables: Iterable[str]) -> None:
        """Of several tokens, use only the last from here on."""
        for name in sorted({*variables}):
            self.add("", f"{name} = {name}[-batch:]")
        self._joined.clear()

    def define(self, arguments: Sequence[str], write: Callable[[], str]) -> str:
        """Write a function, whose lines are added and whose result is returned by `write`, and return its name."""
        outer, self._lines = self._lines, []
        y = write()
        name = f"f{len(self._functions)}"
        self.splits = self.splits and all(line == several for line, several in self._lines)
        lines = [line for line, _ in self._lines if line]
        self._functions.append(_function(f"{name}({', '.join(arguments)})", [*lines, f"return {y}"]))
        self._lines = outer
        return name

    def assign(self, expression: str) -> str:
        name = self.variable()
        self.add(f"{name} = {expression}")
        return name

    def split(self, y: str, widths: tuple[int, ...], axis: int = -1) -> list[str]:
        parts = [self.variable() for _ in widths]
        self.add(f"{', '.join(parts)} = {y}.split_with_sizes({widths}, {axis})")
        return parts

    def constant(self, value: Any) -> str:
        if id(value) not in self._constants:
            self._constants[id(value)] = f"c{len(self._names)}"
            self._names[self._constants[id(value)]] = value
        return self._constants[id(value)]

    def prepared(self, prepare: Callable[[], Any], value: Any = None) -> str | None:
        """Return the name of a constant that `prepare` computes from parameters, or None if it returns None.

        value: its result, if it was called before.
        """
        value = prepare() if value is None else value
        if value is None:
            return None
        name = self.constant(value)
        self._prepared[name] = prepare
        return name

    @property
    def values(self) -> Values:
        """The values of all constants by name."""
        return MappingProxyType(self._names)

    def prepared_again(self) -> Values | None:
        """Return the values of all constants, with the prepared ones computed again, or None if one of these is None.

        Functions made of earlier values do not change, since another thread may be running them.
        """
        again = {name: prepare() for name, prepare in self._prepared.items()}
        return None if None in again.values() else MappingProxyType(self._names | again)

    def unpack(self, declared: States, path: Path) -> None:
        """Assign each part of the state to a variable and check it against its declaration."""
        own = self._given[path]
        self.add(f"if len({own}) != {len(declared)}: return None")
        for key, item in declared.items():
            inside, found = (*path, key), self.assign(f"{own}[{key!r}]")
            self._given[inside] = found
            if isinstance(item, State):
                kind = self.constant(dtype_of(item, self._dtype))
                sizes = "".join(f" {size}," for size in item.shape)
                if item.length:  # the first axis is as long as the context
                    sizes = f" {found}.shape[1],{''.join(f' {size},' for size in item.shape[1:])}"
                self.add(f"if {found}.shape != (batch,{sizes}) or {found}.dtype is not {kind}: return None")
                self.add(f"if {found}.device != device: return None")
                if self._is_converted(item):
                    self._given[inside] = self.assign(f"{found}.float()")
            else:
                self.unpack(item, inside)

    def _is_converted(self, item: State) -> bool:
        return dtype_of(item, self._dtype) in HALF_KINDS and not item.per_token

    def carry_over(self, path: Path) -> str:
        """Return the variable of a part of the state, and mark that part as unchanged."""
        self._made[path] = self._given[path]
        return self._given[path]

    def given(self, path: Path) -> str:
        """Return the variable of a part of the given state."""
        return self._given[path]

    def keep(self, path: Path, expression: str) -> None:
        """Set a part of the returned state."""
        self._made[path] = self.assign(expression)

    def at_ports(self, node: OpNode, inputs: Sequence[str]) -> list[str]:
        """Return an argument for each port: several wires are concatenated, a port without wires gets None."""
        arguments = []
        at = 0
        for port in node.op.ports:
            part = inputs[at : at + len(node.inputs.get(port.name, ()))]
            at += len(part)
            part = part[-1:] if is_prefix_join(node) else part  # the prefix was read before the first token
            arguments.append(self._join(part) if len(part) > 1 else part[0] if part else "None")
        return arguments

    def _join(self, part: Sequence[str]) -> str:
        whole = f"cat(({', '.join(part)}), -1)"
        if whole not in self._joined:
            self._joined[whole] = self.assign(whole)
        return self._joined[whole]

    def call(
        self, run: str, inputs: Sequence[str], path: Path, state: list[str], several: Several | None = None
    ) -> str:
        """Call the TokenFunction of the name `run` with a step's state and inputs; return the variable of the output.

        several: how several tokens of each sequence are computed (default: as those of several sequences).
        """
        parts, made, y = [(*path, part) for part in state], [self.variable() for _ in state], self.variable()
        states = [self._given[part] for part in parts]
        self._made |= zip(parts, made, strict=True)
        results, given = ", ".join([y, *made]), ", ".join([*states, *inputs])
        call = f"{run}.one({given})"
        if several and several.together:
            call = f"{run}.several(batch, {given})"
        elif several:
            call = f"{self.constant(over_tokens)}({run}.one, batch, [{', '.join(states)}], [{', '.join(inputs)}])"
        if several and several.whole and several.when != "True":
            whole = f"{several.whole}(batch, {given})"
            call = f"{call} if {several.when} else {whole}" if several.when else whole
        self.add(f"{results} = {run}.one({given})", f"{results} = {call}")
        return y

    def replace_state(self, path: Path, state: list[str], function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the parts of a state that a step has returned."""
        for part in state:
            whole = (*path, part)
            self._made[whole] = self.assign(f"{self.constant(function)}({self._made[whole]})")

    def call_with_all_state(self, run: TokenFunction, inputs: Sequence[str], path: Path, count: int) -> list[str]:
        """Call a function with the whole state at a path, a dict, or None if there is no state.

        It returns so many outputs and the state; return the variables of the outputs.
        """
        made, given = [self.variable() for _ in range(count)], ", ".join([self._given.get(path, "None"), *inputs])
        self._made[path] = self.variable()
        self.calls_modules = True
        name, results = self.constant(run), ", ".join([*made, self._made[path]])
        self.add(f"{results} = {name}.one({given})", f"{results} = {name}.several(batch, {given})")
        return made

    def function(self, y: str, declared: States, of_frame: bool) -> Maker:
        """Compile the function of one token, or of a frame x [batch, tokens], whose result is the variable `y`."""
        as_rows_of = [f"x = {self.constant(as_rows)}(x)"] if of_frame else []
        first = ["batch, device = x.shape[0], x.device", *as_rows_of]
        return self._compiled("run(state, x)", first, y, declared, several=of_frame)

    def function_of_several(self, y: str, declared: States) -> Maker:
        """Do the same for several tokens: x [seq * batch], those of all sequences one after another."""
        first = ["tokens, device = x.shape[0] // batch, x.device"]
        return self._compiled("read(state, x, batch)", first, y, declared, several=True)

    def _compiled(self, header: str, first: list[str], y: str, declared: States, several: bool) -> Maker:
        """Return a function that takes the values of all constants and returns the function with this header.

        Constants are variables of a closure, not globals, so that functions do not refer to each other in a cycle.
        """
        lines = [*first, *filter(None, (line[several] for line in self._lines))]
        lines.append(f"return {y}, {self._packed(declared, ())}")
        lines = [*_freeing(lines)] if several else lines
        functions = [*self._functions, _function(header, lines)]
        within = [line for function in functions for line in function.split("\n")]
        constants, made = [*self._names], dict[str, Any]()
        exec(_function(f"make({', '.join(constants)})", [*within, f"return {header.partition('(')[0]}"]), made)  # noqa: S102
        make = made.pop("make")
        return lambda values: make(*map(values.__getitem__, constants))  # by name takes quadratic time

    def _packed(self, declared: States | State, path: Path) -> str:
        if path in self._made:
            is_converted = isinstance(declared, State) and self._is_converted(declared)
            return f"{self._made[path]}.to({self.constant(self._dtype)})" if is_converted else self._made[path]
        assert isinstance(declared, dict)
        return "{" + ", ".join(f"{key!r}: {self._packed(item, (*path, key))}" for key, item in declared.items()) + "}"


def _freeing(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a function and delete each variable after its last use, so that not all use memory at once."""
    last = {name: at for at, line in enumerate(lines) for name in _VARIABLE.findall(line)}
    assigned = {name for line in lines for name in line.partition(" = ")[0].split(", ")}
    unused: dict[int, list[str]] = {}
    for name in assigned & last.keys():
        unused.setdefault(last[name], []).append(name)
    for at, line in enumerate(lines):
        yield line
        if at in unused and at < len(lines) - 1:
            yield f"del {', '.join(sorted(unused[at]))}"


def _function(header: str, lines: list[str]) -> str:
    return "\n    ".join([f"def {header}:", *lines])
