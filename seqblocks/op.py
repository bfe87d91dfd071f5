"""What a primitive is. One class in one file says everything about it: arguments, ports, shape, parameters, state,
cost, and how it computes. The validator reads the declarations without torch; `forward` imports torch when it runs.

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
from seqblocks.parameters import INITIALISERS, Init, Parameter, State
from seqblocks.types import UNBOUNDED, Facts, Kind, Wire, divisors_near

Reads = Literal["token", "past", "all"]
READS = typing.get_args(Reads)
BUILTIN_PACKAGE = "seqblocks.ops"
PLUGIN_GROUP = "seqblocks.ops"  # entry points of this group are imported when an unknown verb is met
RENAMED = "_of_yours"  # what `--import` adds to the name of a file that an installed module has too


class Port(NamedTuple):
    """An input of an op.

    `main`: takes the previous step's output unless `from:` (or the port's name) says otherwise.
    `joins`: accepts a list of wires, joined along the feature axis.
    `size_only`: the op reads how many tokens there are, not what they hold; that uses no step (E315).
    `length`: ports with the same word read sequences of one length, by default that of the main input.
    `broadcast`: a vector, where the others are sequences or images, meets each of their tokens. The op's declarations
    and `forward` then see it as a sequence or an image.
    """

    name: str
    about: str = ""
    main: bool = False
    joins: bool = False
    optional: bool = False
    kinds: tuple[Kind, ...] = ("sequence",)
    size_only: bool = False
    length: str = ""
    broadcast: bool = False


class Split(NamedTuple):
    """A way to compute an op on several ranks, each with an equal part of the features.

    op: what a rank computes. parts: the ports of which it reads its part of the features; the others it reads whole.
    cuts: the parameters of which it has a part, and the axis that is cut; the others are whole. sums: whether the
    ranks' outputs are summands of the output; else each is a part of its features. added: parameters that are added
    to the output, of which each rank may then add its share only.
    """

    op: "Op"
    parts: tuple[str, ...] = ()
    cuts: Mapping[str, int] = types.MappingProxyType({})
    sums: bool = False
    added: tuple[str, ...] = ()


X = Port("x", "the input", main=True)
ANY = Port("x", "the input", main=True, kinds=("sequence", "vector"))


def argument(default: Any, about: str, *, inherit: str | None = None, **limits: Any) -> Any:
    """A documented argument; `...` as default makes it required. Limits are pydantic's (`gt`, `ge`, `le`, …).

    `inherit="tokens"` fills it, where the step leaves it out, with that property of the model's input.
    """
    extra: dict[str, Any] | None = {"inherit": inherit} if inherit else None
    return Field(default, description=about, json_schema_extra=extra, **limits)


class Op(BaseModel):
    """Base of all primitives. Subclass it, decorate it with `@primitive(verb)`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    verb: ClassVar[str] = ""
    ports: ClassVar[tuple[Port, ...]] = (X,)
    reads: ClassVar[Reads] = "token"
    """What an output position depends on: its own token, the tokens before it too (then `state` says what is carried),
    or the whole sequence (such an op cannot stream)."""
    reversible: ClassVar[bool] = False
    """Reads "past", and computes the reverse order itself when `call.reverse` is set, without a flipped copy."""
    independent: ClassVar[str] = ""
    """What it treats each by itself, so that several ranks may share the work: `features`, or the heads or groups that
    an argument of this name counts (0: features). All inputs and the output then have the same parts, and so has the
    first axis of each parameter. See `splits` for other cases."""
    summary_cost: ClassVar[float] = 0.0
    """How long `transition` takes, as a share of the time of `forward`; 0 where it copies inputs at most."""
    source: ClassVar[str] = ""
    """The paper or equation it implements."""
    open_keys: ClassVar[bool] = False
    """Whether keys that are not declared are whole numbers (`model_config` must allow extra ones then)."""
    exact: ClassVar[bool] = False
    """Returns float32 in a model of 16 bits."""
    mixed: ClassVar[bool] = False
    """Takes float32 inputs in a model of 16 bits; others with parameters of 16 bits have such inputs converted."""
    builtin: ClassVar[bool] = False
    """Whether it is one of seqblocks' own; set when it is registered."""

    # The inputs come in the order of `ports`, an absent optional one as None. Open signatures let an op name its own.

    def shape(self, *wires: Any, **_: Any) -> Wire:
        """Return the output's type; by default that of the first input. Raises Fault."""
        first: Wire = wires[0]
        return first

    def parameters(self, *wires: Any, **_: Any) -> dict[str, Parameter]:
        """Return the parameters that it owns, by name."""
        return {}

    def state(self, *wires: Any, **_: Any) -> dict[str, State]:
        """Return the state that it carries from token to token, by name."""
        return {}

    def macs(self, *wires: Any, **_: Any) -> int:
        """Return the multiply-accumulates for one token of the output, or for the whole output if it is a vector."""
        return 0

    def looks_ahead(self, *wires: Any, **_: Any) -> int | float:
        """Return how many more later tokens of the model's input an output depends on than its inputs (inf: all).

        A token that is made of several has the position of the first of them. Default: by `reads`.
        """
        return math.inf if self.reads == "all" else 0

    def facts(self, *wires: Any, **_: Any) -> Facts:
        """Return what is known of the numbers of the output; the wires say what is known of the inputs."""
        return UNBOUNDED

    def warns(self, *wires: Any, **_: Any) -> Iterable[Fault]:
        """Return what is legal and most likely a mistake, as Faults with a code that begins with W."""
        return ()

    def is_upright(self, *wires: Any, **_: Any) -> bool:
        """Return whether rows and columns of an image are not alike to it, so that no scan may exchange them."""
        return False

    def makes_grid(self) -> bool:
        """Return whether `forward` sets rows and columns of its output (`call.set_grid`): they are not its input's."""
        return False

    def calls(self, *wires: Any, **_: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the kernel that `forward` calls, and the options that decide its implementation."""
        return None

    def forward(self, p: Mapping[str, Any], call: Any, *inputs: Any, **_: Any) -> Any:
        """Compute. `p` has the parameters by name, `call` what goes with the call (`seqblocks.runtime.call.Call`).

        An op that declares state returns `(output, state)`; `call.state` is the state it was given, or None.
        """
        raise TypeError(f"{type(self).__name__} does not compute")

    def matrix(self, p: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return W [O, I] and b [O], or None, where a token's output is W x + b, so that several may be one product.

        What it derives from `p` holds as long as for `prepare_step`.
        """
        return None

    def transition(self, p: Mapping[str, Any], call: Any, *inputs: Any) -> Callable[[Any], Any] | None:
        """Return what these tokens make of a state: a function from the one before them to the one after them.

        It serves sequences whose parts are on several devices: what takes time is computed before the state is there,
        and the function itself is short. None, the default, where `forward` has to say. `call` has resets, and no
        state.
        """
        return None

    def prepare_step(self, p: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return a function that computes one token of a stream without gradients, or None where `forward` will do.

        It is called with the parts of the op's state, in the order of `state`, and then the inputs [batch, features],
        an absent one as None; all are of one dtype (float32 or float64) and on a CPU. It returns y [batch, features],
        or where there is a state (y, *its new parts), each in memory of its own. What it derives from the parameters
        `p` holds until one of them changes: it is then prepared anew.
        """
        return None

    def splits(self, ranks: int, *wires: Any, **_: Any) -> Iterable[Split]:
        """Return the ways to compute it on so many ranks, by default as `independent` says; without any it is
        computed whole on each. Raises Fault where its heads or groups cannot be dealt out evenly.
        """
        return evenly(self, ranks, self.independent, wires) if self.independent else []

    def cannot_stream(self, *wires: Any, **_: Any) -> str | None:
        """Return why it cannot run token by token on these wires, or None."""
        return "it reads the whole sequence" if self.reads == "all" else None

    def ignores_resets(self, *wires: Any, **_: Any) -> str | None:
        """Return why it mixes the sequences that `resets` separate, so that the model refuses resets, or None."""
        return "it reads the whole sequence" if self.reads == "all" else None


T = TypeVar("T", bound=type[Op])

PRIMITIVES: dict[str, type[Op]] = {}


def primitive(verb: str) -> Callable[[T], T]:
    """Register an Op under its verb."""

    def register(cls: T) -> T:
        if not (isinstance(cls, type) and issubclass(cls, Op)):
            raise TypeError(f"a primitive is a class derived from Op, and {cls!r} is none")
        if not (verb.isascii() and verb.isidentifier()):
            raise ValueError(f"the verb {verb!r} is not a name: letters, digits and _, not beginning with a digit")
        known = PRIMITIVES.get(verb)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the verb '{verb}' is taken by {known.__module__}.{known.__qualname__}")
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
    """Check the class of a primitive that is not built in. Raises TypeError."""
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
            raise TypeError(f"{cls.__qualname__}.{name} has a default that it does not take: {reason}") from None
        except (PydanticUserError, PydanticUndefinedAnnotation):  # a type that is defined further down
            continue


@lru_cache(maxsize=1)
def builtin_verbs() -> dict[str, str]:
    """Return the verbs of `seqblocks.ops` and the modules that define them. A new file there needs no entry in a list.

    The sources are searched for `@primitive("…")` rather than imported, because a spec uses few of them and defining
    all models would cost more than checking it. Where there are no sources, all are imported.
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
    """Import what other packages offer under the entry-point group `seqblocks.ops`; returns what failed, as text."""
    from importlib.metadata import entry_points  # 20 ms that only a spec with an unknown verb pays

    failed = []
    for entry in entry_points(group=PLUGIN_GROUP):
        try:
            entry.load()
        except BaseException as error:  # a broken plug-in must not take every spec down with it, SystemExit included
            if isinstance(error, KeyboardInterrupt) and interrupts_raise():
                raise
            failed.append(f"plug-in '{entry.name}' ({entry.value}) did not load: {one_line(error)}")
    return tuple(failed)


def has_plugin(name: str) -> bool:
    """Return whether a module of this name was imported, or an installed package offers it as a plug-in."""
    if name in sys.modules or f"{name}{RENAMED}" in sys.modules:
        return True
    from importlib.metadata import entry_points  # only a spec that names a plug-in needs it

    offered = (each for entry in entry_points(group=PLUGIN_GROUP) for each in (entry.name, entry.module))
    return any(each == name or each.startswith(f"{name}.") for each in offered)


def interrupts_raise() -> bool:
    """Return whether an interrupt raises KeyboardInterrupt: on the command line it ends the process instead."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def one_line(error: BaseException) -> str:
    """Return an exception of code that is not ours as one line of at most 200 characters."""
    if isinstance(error, SystemExit):
        return "the module ends the program, and should only define primitives"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {(text.strip().splitlines() or ['no message'])[0][:200]}"


def find_primitive(verb: str) -> type[Op] | None:
    """Return the op of a verb, or None. Plug-ins are loaded only if it is not known."""
    if verb not in PRIMITIVES:
        module = builtin_verbs().get(verb)
        if module:
            importlib.import_module(module)
        else:
            load_plugins()
    return PRIMITIVES.get(verb)


STATE_DTYPES = ("model", "float64", "float32", "bfloat16", "float16", "int64")


def check_declared(cls: type[Op], type: Any, parameters: Any, state: Any, macs: Any, facts: Any) -> None:
    """Check what a primitive that is not built in declares for one use. Raises UsageError."""

    def sizes(shape: Any) -> bool:
        return isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)

    def each(table: Any, kind: Any) -> bool:
        return isinstance(table, dict) and all(isinstance(x, kind) and sizes(x.shape) for x in table.values())

    def numbers(init: Init) -> bool:
        values, known = init.values, INITIALISERS[init.name].arguments
        sound = isinstance(values, tuple) and len(values) == len(known)
        return sound and all(isinstance(value, int | float) for value in values)

    wrong = None
    if not isinstance(type, Wire):
        wrong = "shape", "a Wire, for instance x or x.with_features(8)", type
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
        method, wanted, found = wrong
        raise UsageError(f"{cls.__module__}.{cls.__qualname__}.{method} must give {wanted}, not {str(found)[:80]}")


# --- what kind of value an argument takes: decided by the field's type, never by how the text looks ---------------


class FieldKind(NamedTuple):
    """number | flag | word | words | value; `choices` are the legal words (of a list's items too, unless `free`).

    open: any other word is legal too, the name of a step for instance.
    """

    kind: Literal["number", "flag", "word", "words", "value"]
    choices: tuple[str, ...] = ()
    whole: bool = False
    optional: bool = False
    free: bool = False
    open: bool = False


@lru_cache(maxsize=1024)
def fields_of(model: type[BaseModel]) -> dict[str, FieldKind]:
    """Return the kind of each argument of an op or combinator, by the name that YAML uses."""
    return {name: field_kind(info.annotation) for name, info in field_infos(model).items()}


def field_infos(model: type[BaseModel]) -> dict[str, Any]:
    """Return pydantic's record of each argument, by the name that YAML uses (an alias where a method has the name)."""
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
    if options[0] is bool:
        return FieldKind("flag", optional=optional)
    if options[0] in (int, float):
        return FieldKind("number", whole=options[0] is int, optional=optional)
    if options[0] is str:
        return FieldKind("word", optional=optional)
    return FieldKind("value", optional=optional)


def evenly(op: Op, ranks: int, what: str, wires: Iterable[Wire | None], whole: Iterable[str] = ()) -> list[Split]:
    """Return the split in which a rank computes a share of an op's features, or of the heads that `what` counts.

    whole: ports that are read whole. A single head has no split. Raises Fault E401 where there are some more that
    cannot be dealt out evenly.
    """
    wires = list(wires)
    count = 0 if what == "features" else getattr(op, what)
    if count == 1:
        return []
    if count % ranks:
        raise Fault("E401", f"{what} {count} cannot be dealt out to {ranks} ranks", at=what)
    local = op.model_copy(update={what: count // ranks} if count else {})
    parts = tuple(port.name for port, wire in zip(op.ports, wires, strict=True) if wire and port.name not in whole)
    return [Split(local, parts, dict.fromkeys(op.parameters(*wires), 0))]


# --- checks that many ops share -----------------------------------------------------------------------------------


def must_divide(value: int, width: int, what: str, of: str, at: str | None = None) -> int:
    """Return width / value. Raises Fault E401 that names the legal values."""
    if value <= 0 or width % value:
        raise Fault(
            "E401",
            f"{what} {value} does not divide {of} {width}",
            at=at or what,
            hint=lambda: divisors_near(width, value),
        )
    return width // value


def must_have_grid(x: Wire, who: str, at: str | None = None, instead: str = "") -> None:
    """Raise Fault E407 unless the tokens of `x` are those of an image. instead: a verb or word that needs none."""
    if x.grid is None:
        source = "an input that is an image or has a `grid: [rows, columns]` (after class_token there is none)"
        raise Fault(
            "E407",
            f"{who} needs the tokens of an image",
            at=at,
            found=f"{x} without rows and columns",
            hint=f"use {instead}, or {source}" if instead else f"start from {source}",
        )


def must_match(name: str, found: Wire, width: int, because: str) -> None:
    """Raise Fault E402 unless port `name` has `width` features."""
    if found.features != width:
        note = found.whence(f"`{name}`")
        raise Fault(
            "E402",
            f"{name} must have {width} features",
            at=name,
            expected=f"{width} ({because})",
            found=f"{found.features}",
            notes=[note] if note else [],
        )


def ids_are_no_numbers(wire: Wire, done: str, name: str) -> Fault:
    """Return the fault of splitting, joining or adding token numbers, which have no features."""
    note = wire.whence(name)
    return Fault(
        "E403",
        f"token numbers cannot be {done}",
        expected="features, as embed gives them",
        found=f"{wire}",
        notes=[note] if note else [],
        hint="look the tokens up first, with embed",
    )
