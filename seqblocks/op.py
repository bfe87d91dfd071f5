"""Base class and registry of primitives. A primitive is one class in one file: arguments, ports, shape, parameters,
state, cost and computation. The validator reads its declarations without torch; `forward` imports torch when it runs.

    @primitive("scale")
    class Scale(Op):
        '''Multiply every feature by a learned gain.'''

        def parameters(self, x):
            return {"weight": Parameter((x.features,), Init("ones"))}

        def forward(self, p, call, x):
            return x * p["weight"]
"""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

import importlib
import math
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from seqblocks.errors import Fault, UsageError
from seqblocks.parameters import INITIALISERS, Init, Parameter
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import UNBOUNDED, Facts, Kind, Tokens, Wire

Reads = Literal["token", "past", "all"]
READS = typing.get_args(Reads)
BUILTIN_PACKAGE = "seqblocks.ops"
PLUGIN_GROUP = "seqblocks.ops"  # entry points of this group are imported when a verb is unknown
RENAMED = "_of_yours"  # suffix that `--import` adds to a file name that is also an installed module


class Port(NamedTuple):
    """An input of an op.

    `main`: takes the previous step's output unless `from:` (or the port's name) says otherwise.
    `joins`: accepts a list of wires, joined along the feature axis, or along the tokens (`roles.joins_tokens`).
    `several`: takes only such a list, of at least two wires.
    `size_only`: the op reads only the number of tokens, not their values, so the wire does not count as used (E315).
    `length`: ports with the same word read sequences of the same length; the default is that of the main input.
    `other_rate`: may read the same sequence at another rate than the first port, of which a token sees only what is
    complete. Ports with the same word then read as many tokens.
    `broadcast`: a vector is expanded to the tokens of the other inputs if these are sequences or images. The op's
    declarations and `forward` then see it as a sequence or an image.
    `gate`: a gate or a decay, whose errors add up in the state: the matrices that compute it are not quantized.
    """

    name: str
    about: str = ""
    main: bool = False
    joins: bool = False
    several: bool = False
    optional: bool = False
    kinds: tuple[Kind, ...] = ("sequence",)
    size_only: bool = False
    length: str = ""
    other_rate: str = ""
    broadcast: bool = False
    gate: bool = False


FLOATS: tuple[Kind, ...] = ("sequence", "vector", "image")
X = Port("x", "the input", main=True)
ANY = Port("x", "the input", main=True, kinds=("sequence", "vector"))


def argument(default: Any, about: str, *, inherit: str | None = None, **limits: Any) -> Any:
    """A documented argument; `...` as default makes it required. Limits are pydantic's (`gt`, `ge`, `le`, …).

    With `inherit="tokens"`, the default is that property of the model's input; with `inherit="depth"`, it is the
    product of the layers of all enclosing `repeat`s.
    """
    extra: dict[str, Any] | None = {"inherit": inherit} if inherit else None
    return Field(default, description=about, json_schema_extra=extra, **limits)


class Op(BaseModel):
    """Base class of primitives. Decorate subclasses with `@primitive(verb)`.

    Methods that only one part of the package asks for, such as tensor parallelism, are in `seqblocks/roles.py`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    verb: ClassVar[str] = ""
    ports: ClassVar[tuple[Port, ...]] = (X,)
    reads: ClassVar[Reads] = "token"
    """What an output position depends on: its own token, the tokens before it too (then `state` says what is carried),
    or the whole sequence (such an op cannot stream)."""
    random: ClassVar[bool] = False
    """Whether it draws random numbers in training mode, when long sequences therefore run at once, not in parts."""
    reversible: ClassVar[bool] = False
    """Reads "past", and computes the reverse order itself when `call.reverse` is set, without a flipped copy."""
    independent: ClassVar[str] = ""
    """What it processes independently, so that ranks can share the work: `features`, or the name of an argument that
    counts heads or groups (0: features). All inputs, the output and the first axis of each parameter then have the same
    parts. See `roles.splits` for other cases."""
    summary_cost: ClassVar[float] = 0.0
    """Cost of `roles.transition` relative to `forward`; 0 if it only copies inputs."""
    source: ClassVar[str] = ""
    """The paper or equation it implements."""
    matrix_names: ClassVar[tuple[str, ...]] = ()
    """The matrices [O, I] that it passes only to `products.linear`, or reads by row, and that may be quantized. A
    subclass that replaces `forward` does not inherit this."""
    usual: ClassVar[tuple[str, ...]] = ()
    """Optional arguments that most steps need, which editors therefore write with the verb."""
    open_keys: ClassVar[bool] = False
    """Whether undeclared keys are whole numbers (`model_config` must then allow extra keys)."""
    names_results: ClassVar[bool] = False
    """Whether undeclared keys are names of results with their formulas; the analysis then lowers the verb by itself."""
    fixed: ClassVar[bool] = False
    """Whether its output depends on no input, so that a stream computes it once."""
    exact: ClassVar[bool] = False
    """Whether it returns float32 in a 16-bit model."""
    mixed: ClassVar[bool] = False
    """Whether it accepts float32 inputs in a 16-bit model; for other ops with 16-bit parameters, they are converted."""
    builtin: ClassVar[bool] = False
    """Whether it belongs to seqblocks itself; set on registration."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Drop what is inherited but describes a `forward` that this class replaces."""
        super().__pydantic_init_subclass__(**options)
        drop_inherited(cls, Op, SAME_AS_FORWARD)

    # Inputs are in the order of `ports`, absent optional ones None. Signatures are open so that ops can name them.

    def shape(self, *wires: Any, **_: Any) -> Wire:
        """Return the type of the output, by default that of the first input. Raises Fault."""
        first: Wire = wires[0]
        return first

    def parameters(self, *wires: Any, **_: Any) -> dict[str, Parameter]:
        """Return the declarations of the op's parameters, by name."""
        return {}

    def state(self, *wires: Any, **_: Any) -> dict[str, State]:
        """Return the declarations of the op's state, by name."""
        return {}

    def buffers(self, *wires: Any, **_: Any) -> dict[str, State]:
        """Return the declarations of tensors that are saved with the parameters but not trained, by name.

        `forward` receives them among its parameters, and may change them in place in training mode. Each use of shared
        parameters has its own. `State.dtype` is "model" or the name of a dtype.
        """
        return {}

    def macs(self, *wires: Any, **_: Any) -> int:
        """Return the multiply-accumulates for one token of the output, or for the whole output if it is a vector."""
        return 0

    def memory(self, tape: Tape, p: Mapping[str, Value], *inputs: Any) -> Value:
        """Record on the tape what `forward` allocates and keeps for the backward pass, and return the output.

        The parameters and inputs are `Value`s: shapes in the place of tensors. `seqblocks memory` calls it. Without a
        declaration, an op is assumed to keep its inputs and its output, and to need no other memory.
        """
        y = tape.new(tape.out)
        given = [value for value in (*inputs, *p.values()) if value is not None]
        tape.function(given, [y], [value for value in inputs if value is not None] + [y])
        return y

    def looks_ahead(self, *wires: Any, **_: Any) -> Tokens:
        """Return the lookahead that the op adds to that of its inputs, in tokens of the model's input (inf: unlimited).

        A token computed from several tokens has the position of the first. A negative number: the op reads only tokens
        that are at least this many earlier. Default: according to `reads`.
        """
        return math.inf if self.reads == "all" else 0

    def looks_back(self, *wires: Any, **_: Any) -> Tokens:
        """Return how many earlier tokens an output may depend on, in tokens of the model's input (inf: unlimited).

        A scan in reverse turns them into later ones. It may be infinite for an op that changes the number of tokens.
        A negative number: the op reads only tokens that are at least this many later. Default: according to `reads`.
        """
        return 0 if self.reads == "token" else math.inf

    def facts(self, *wires: Any, **_: Any) -> Facts:
        """Return the facts about the values of the output; those of the inputs are attributes of the wires."""
        return UNBOUNDED

    def warns(self, *wires: Any, **_: Any) -> Iterable[Fault]:
        """Return warnings about probable mistakes, as Faults whose code begins with W."""
        return ()

    def forward(self, p: Mapping[str, Any], call: Any, *inputs: Any, **_: Any) -> Any:
        """Compute the output. `p`: the parameters by name. `call`: the context (`seqblocks.runtime.call.Call`).

        An op that declares state returns `(output, state)`; `call.state` is the previous state, or None.
        """
        raise TypeError(f"{type(self).__name__} does not define `forward`")

    def matrix(self, p: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return W [O, I] and b [O] (or None) if the output for a token is W x + b, so that products can be merged.

        If W is block-diagonal with blocks of equal size, their number may follow. Values derived from `p` are valid as
        long as those of `prepare_token`. A subclass that replaces `forward` does not inherit this.
        """
        return None

    def prepare_token(self, p: Mapping[str, Any]) -> TokenFunction | None:
        """Return a function that computes one token of a stream without gradients, or None to use `forward`.

        Values derived from the parameters `p` are valid until a parameter changes; the function is then prepared again.
        A subclass that replaces `forward` does not inherit this.
        """
        return None

    def cannot_stream(self, *wires: Any, **_: Any) -> str | None:
        """Return why the op cannot stream on these wires, or None."""
        return "it reads the whole sequence" if self.reads == "all" else None

    def ignores_resets(self, *wires: Any, **_: Any) -> str | None:
        """Return why the op mixes sequences that `resets` separate, which makes resets an error, or None."""
        return "it reads the whole sequence" if self.reads == "all" else None


Op.__annotations__ = {}  # pydantic knows the class variables by now, and would evaluate these for each subclass

SAME_AS_FORWARD = ("matrix", "matrix_names", "prepare_token", "memory")


def drop_inherited(cls: type[Op], base: type[Op], names: Iterable[str]) -> None:
    """Where `cls` replaces `forward` but inherits methods that compute the same, use those of `base` instead."""
    for name in names:
        general = getattr(base, name)
        if getattr(cls, name) is not general and _depth(cls, "forward") < _depth(cls, name):
            setattr(cls, name, general)


def _depth(cls: type[Op], method: str) -> int:
    """Return which of the classes that `cls` inherits from defines a method, counted from `cls` itself."""
    return next(depth for depth, each in enumerate(cls.__mro__) if method in vars(each))


T = TypeVar("T", bound=type[Op])

PRIMITIVES: dict[str, type[Op]] = {}


def primitive(verb: str) -> Callable[[T], T]:
    """Register an Op under its verb."""

    def register(cls: T) -> T:
        if not (isinstance(cls, type) and issubclass(cls, Op)):
            raise TypeError(f"a primitive must be a subclass of Op, not {cls!r}")
        if not (verb.isascii() and verb.isidentifier()):
            raise ValueError(
                f"the verb {verb!r} is not a valid name: use letters, digits and _, not beginning with a digit"
            )
        known = PRIMITIVES.get(verb)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the verb '{verb}' is already defined by {known.__module__}.{known.__qualname__}")
        cls.builtin = cls.__module__.rpartition(".")[0] == BUILTIN_PACKAGE
        if not cls.builtin and builtin_verbs().get(verb):
            raise ValueError(f"the verb '{verb}' is built in; {cls.__module__}.{cls.__qualname__} needs another")
        if not cls.builtin:
            _check_class(cls)
        cls.verb = verb
        PRIMITIVES[verb] = cls
        return cls

    return register


def _check_class(cls: type[Op]) -> None:
    """Check the class of a primitive from a plug-in. Raises TypeError."""
    from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError  # slow to import

    if not isinstance(cls.ports, tuple) or not all(isinstance(port, Port) for port in cls.ports):
        raise TypeError(f"{cls.__qualname__}.ports must be a tuple of Port(name, about, …), not {cls.ports!r}")
    if cls.reads not in READS:
        raise TypeError(f"{cls.__qualname__}.reads must be one of {', '.join(READS)}, not {cls.reads!r}")
    for name, info in cls.model_fields.items():
        if info.is_required():
            continue
        kind: Any = Annotated[(info.annotation, info)]
        try:
            TypeAdapter(kind).validate_python(info.default)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise TypeError(f"{cls.__qualname__}.{name} has an invalid default: {reason}") from None
        except (PydanticUserError, PydanticUndefinedAnnotation):  # a type that is defined further down
            continue


@lru_cache(maxsize=1)
def builtin_verbs() -> dict[str, str]:
    """Return the verbs of `seqblocks.ops` and the modules that define them.

    The sources are searched for `@primitive("…")` instead of being imported, because a spec uses few of them and
    defining all pydantic models would take longer than checking it. Without sources, all modules are imported.
    """
    package = importlib.import_module(BUILTIN_PACKAGE)
    found: dict[str, str] = {}
    for folder in filter(os.path.isdir, package.__path__):
        for file in sorted(os.listdir(folder)):
            if file.endswith(".py"):
                with open(os.path.join(folder, file), "rb") as source:
                    _, *uses = source.read().split(b'\n@primitive("')  # a tenth of the time of a pattern
                verbs = (use[: use.index(b'"')].decode() for use in uses)
                found |= dict.fromkeys(verbs, f"{BUILTIN_PACKAGE}.{file[:-3]}")
    if not found:
        _import_all(package)
    return {**dict.fromkeys(PRIMITIVES, ""), **found}


def _import_all(package: types.ModuleType) -> None:
    import pkgutil  # only an installation without sources pays for it

    for module in pkgutil.iter_modules(package.__path__, f"{BUILTIN_PACKAGE}."):
        importlib.import_module(module.name)


def load_builtin() -> None:
    """Import every primitive of `seqblocks.ops`."""
    for module in builtin_verbs().values():
        if module:
            importlib.import_module(module)


@lru_cache(maxsize=1)
def load_plugins() -> tuple[str, ...]:
    """Import plug-ins from the entry-point group `seqblocks.ops`; return messages about those that failed."""
    from importlib.metadata import entry_points  # takes 20 ms, and is only needed for an unknown verb

    failed = []
    for entry in entry_points(group=PLUGIN_GROUP):
        try:
            entry.load()
        except BaseException as error:  # a broken plug-in must not break every spec, even if it raises SystemExit
            if isinstance(error, KeyboardInterrupt) and interrupts_raise():
                raise
            failed.append(f"plug-in '{entry.name}' ({entry.value}) did not load: {one_line(error)}")
    return tuple(failed)


def has_plugin(name: str) -> bool:
    """Return whether a module with this name was imported, or is a plug-in of an installed package."""
    if name in sys.modules or f"{name}{RENAMED}" in sys.modules:
        return True
    from importlib.metadata import entry_points  # only a spec that names a plug-in needs it

    offered = (each for entry in entry_points(group=PLUGIN_GROUP) for each in (entry.name, entry.module))
    return any(each == name or each.startswith(f"{name}.") for each in offered)


def interrupts_raise() -> bool:
    """Return whether an interrupt raises KeyboardInterrupt: on the command line it ends the process instead."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def one_line(error: BaseException) -> str:
    """Format an exception of third-party code in one line of at most 200 characters."""
    if isinstance(error, SystemExit):
        return "the module exits the program; it should only define primitives"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {(text.strip().splitlines() or ['no message'])[0][:200]}"


def find_primitive(verb: str) -> type[Op] | None:
    """Return the op of a verb, or None. Plug-ins are loaded only if the verb is unknown."""
    if verb not in PRIMITIVES:
        module = builtin_verbs().get(verb)
        if module:
            importlib.import_module(module)
        else:
            load_plugins()
    return PRIMITIVES.get(verb)


STATE_DTYPES = ("model", "float64", "float32", "bfloat16", "float16", "int64")


def check_declared(cls: type[Op], wire: Any, parameters: Any, state: Any, macs: Any, facts: Any) -> None:
    """Check the declarations of a primitive from a plug-in for one use. Raises UsageError."""

    def sizes(shape: Any) -> bool:
        return isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)

    def each(table: Any, kind: Any) -> bool:
        return isinstance(table, dict) and all(isinstance(x, kind) and sizes(x.shape) for x in table.values())

    def numbers(init: Init) -> bool:
        values, known = init.values, INITIALISERS[init.name].arguments
        is_valid = isinstance(values, tuple) and len(values) == len(known)
        return is_valid and all(isinstance(value, int | float) for value in values)

    wrong = None
    if not isinstance(wire, Wire):
        wrong = "shape", "a Wire, for instance x or x.with_features(8)", wire
    elif not each(parameters, Parameter):
        wrong = "parameters", "a dict of name: Parameter(sizes, Init(…))", parameters
    elif bad := [p.init for p in parameters.values() if not (isinstance(p.init, Init) and p.init.name in INITIALISERS)]:
        wrong = "parameters", f"Init with one of {', '.join(INITIALISERS)}", bad[0]
    elif bad := [p.init for p in parameters.values() if not numbers(p.init)]:
        known = INITIALISERS[bad[0].name].arguments
        tuple_of = f"({', '.join(name for name, _ in known)}{',' if len(known) == 1 else ''})"
        wrong = "parameters", f"Init('{bad[0].name}', {tuple_of}) with numbers", tuple(bad[0])
    elif not each(state, State):
        wrong = "state", "a dict of name: State(sizes)", state
    elif bad := [s.dtype for s in state.values() if s.dtype not in STATE_DTYPES]:
        wrong = "state", f"a dtype that is one of {', '.join(STATE_DTYPES)}", bad[0]
    else:
        others = (("macs", "a number", macs, int | float), ("facts", "Facts(low, high)", facts, Facts))
        wrong = next((each[:3] for each in others if not isinstance(each[2], each[3])), None)
    if wrong:
        method, expected, found = wrong
        raise UsageError(f"{cls.__module__}.{cls.__qualname__}.{method} must return {expected}, not {str(found)[:80]}")


# --- kinds of arguments, determined by the type of the field, not by the text -------------------------------------


class Over(NamedTuple):
    """Mark a text as an expression in which these names have a value for each number that it computes.

    Written `Annotated[str, Over(("feature", "features"))]`. Other names are numbers in scope, and replaced by these.
    """

    names: tuple[str, ...]


class FieldKind(NamedTuple):
    """number | flag | word | words | mapping | formula | value.

    choices: the allowed words (also of a list's items, unless `free`).
    open: any other word is legal too, the name of a step for instance. entries: the entries of a mapping.
    over: the names of a formula that have several values.
    """

    kind: Literal["number", "flag", "word", "words", "mapping", "formula", "value"]
    choices: tuple[str, ...] = ()
    whole: bool = False
    optional: bool = False
    free: bool = False
    open: bool = False
    entries: type[BaseModel] | None = None
    over: tuple[str, ...] = ()


@lru_cache(maxsize=1024)
def fields_of(model: type[BaseModel]) -> dict[str, FieldKind]:
    """Return the kind of each argument of an op or combinator, by the name that YAML uses."""
    return {name: field_kind(info.annotation) for name, info in field_infos(model).items()}


def field_infos(model: type[BaseModel]) -> dict[str, Any]:
    """Return pydantic's field of each argument, by its name in YAML (an alias if a method has the name)."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def field_kind(annotation: Any) -> FieldKind:
    """Return the kind of an argument from its annotation."""
    options = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
    optional = len(options) != len(typing.get_args(annotation) or (annotation,))
    choices: list[str] = []
    plural = free = False
    for option in options:
        if typing.get_origin(option) in (list, tuple):
            plural = True
            option = typing.get_args(option)[0]
            free = option is str
        if typing.get_origin(option) is Literal:
            choices += [c for c in typing.get_args(option) if c not in choices]
    if choices:
        kind: Literal["words", "word"] = "words" if plural else "word"
        return FieldKind(kind, tuple(map(str, choices)), optional=optional, free=free, open=str in options)
    if typing.get_origin(options[0]) is Annotated:
        (over,) = (mark for mark in options[0].__metadata__ if isinstance(mark, Over))
        return FieldKind("formula", optional=optional, over=over.names)
    if options[0] is bool:
        return FieldKind("flag", optional=optional)
    if options[0] in (int, float):
        return FieldKind("number", whole=options[0] is int, optional=optional)
    if options[0] is str:
        return FieldKind("word", optional=optional)
    if isinstance(options[0], type) and issubclass(options[0], BaseModel):
        return FieldKind("mapping", optional=optional, entries=options[0])
    return FieldKind("value", optional=optional)
