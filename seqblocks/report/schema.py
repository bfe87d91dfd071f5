"""A JSON schema (draft 7) of the language for editors, made from the declarations.

A general schema cannot know which blocks a file defines and uses, nor which names its `let` and `args` define. It
leaves unknown verbs and words open, so that a correct file never raises an alarm. `schema(file)` knows them for one
file and closes both, so that a misspelt one is flagged too.

pydantic's own schema does not serve: its unions raise alarms on correct files and offer no completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seqblocks.analysis import check
from seqblocks.analysis.translation import LAYOUTS
from seqblocks.combinators import Combinator
from seqblocks.language.spec import (
    ARGUMENT_TYPES,
    BLOCK_KEYS,
    EXPECT_KEYS,
    FILE_KEYS,
    MODEL_KEYS,
    VERSION,
    Argument,
    Block,
    SpecFile,
    bundled,
)
from seqblocks.op import Op
from seqblocks.recipes import LISTS, RECIPES, FromSeveral, words_of
from seqblocks.report.reference import Argument as Declared
from seqblocks.report.reference import Verb, about, arguments, is_required, ports, verbs

Schema = dict[str, Any]
STEPS: Schema = {"$ref": "#/definitions/steps"}
STEP: Schema = {"$ref": "#/definitions/step"}
WIRE: Schema = {"type": "string", "description": "the name of a wire"}
NUMBER: Schema = {"type": ["number", "string"]}
SIZE: Schema = {"type": ["integer", "string"], "description": "the size of an axis of the pattern"}
PAIR: Schema = {"type": ["number", "string", "array"]}
FLAG: Schema = {"type": ["boolean", "string"], "not": {"enum": ["yes", "no", "on", "off"]}}
LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
STEP_KEYS: dict[str, Schema] = {
    "from": {"type": ["string", "array"], "description": "the wire to read instead of the step before"},
    "as": {
        "type": ["string", "array", "object"],
        "description": "a name for the output; [a, b] cuts the features in equal parts, {a: 96, b: 32} in these",
    },
    "name": {"type": "string", "description": "the step's namespace in the state_dict"},
    "init": {
        "type": "object",
        "description": "parameter: initialiser, for instance {weight: zeros}",
        "additionalProperties": {"type": "string"},
    },
    "tie": {"type": ["string", "object"], "description": "the step whose parameters these are"},
    "share": {"type": "string", "description": "the step above whose parameters this one uses"},
    "when": {**FLAG, "description": "a condition; where it is false the step is absent, and its input is read instead"},
}


def schema(file: SpecFile | None = None) -> Schema:
    """Return the schema: for one file, or general."""
    words = _names(file) if file else None
    blocks = file.visible if file else _bundled_blocks()
    table: dict[str, Schema] = {name: _verb(verb, words) for name, verb in verbs().items()}
    table |= {name: _block(block) for name, block in blocks.items()}
    table |= {argument.name: _passed(argument) for argument in _arguments_that_are_steps(file)}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "seqblocks",
        "type": "object",
        "required": ["seqblocks"],
        "properties": _top(),
        "additionalProperties": False,
        "definitions": {
            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}},
            "step": _step(table, closed=file is not None),
            "verbs": table,
        },
    }


def _step(table: dict[str, Schema], closed: bool) -> Schema:
    """A bare verb, or one verb with its arguments. A closed list flags a misspelt verb; an open one offers verbs."""
    bare: Schema = {"enum": [name for name, made in table.items() if not made.get("required")]}
    with_arguments = _object({name: {"$ref": f"#/definitions/verbs/{name}"} for name in table}, [])
    return {
        "if": {"type": "string"},
        "then": bare if closed else {"anyOf": [bare, {"type": "string"}]},
        "else": {**with_arguments, "minProperties": 1, "maxProperties": 1, "additionalProperties": not closed},
    }


# --- the keys of a file -------------------------------------------------------------------------------------------


def _top() -> dict[str, Schema]:
    names = _checkpoint()
    top: dict[str, Schema] = {
        "seqblocks": {"const": VERSION, "description": "the version of the language"},
        "about": {"type": "string"},
        "needs": {
            "description": "plug-ins that the spec relies on, by the names of their modules",
            "type": "array",
            "items": {"type": "string"},
        },
        "use": {
            "description": "blocks of other files: bundled ones by name, your own by path",
            "type": "array",
            "items": {"anyOf": [{"enum": list(bundled())}, {"type": "string"}]},
        },
        "let": {"type": "object", "description": "names for numbers, words, flags and lists"},
        "blocks": {
            "type": "object",
            "description": "verbs of your own",
            "additionalProperties": _block_definition(names),
        },
        "model": _model(),
        "expect": _expect(),
        "checkpoint": names,
    }
    return {key: top[key] for key in FILE_KEYS}


def _model() -> Schema:
    several = "inputs by name: the first streams, the others are context"
    returned = "the wires that a call returns, by name"
    keys: dict[str, Schema] = {
        "about": {"type": "string"},
        "input": _input(),
        "inputs": {"description": several, "type": "object", "additionalProperties": _input(), "minProperties": 1},
        "steps": STEPS,
        "outputs": {"description": returned, "type": "array", "items": WIRE, "minItems": 1},
    }
    return {
        **_object({key: keys[key] for key in MODEL_KEYS}, ["steps"]),
        "oneOf": [{"required": ["input"]}, {"required": ["inputs"]}],
    }


def _input() -> Schema:
    kinds: dict[str, Schema] = {
        "tokens": {**NUMBER, "description": "size of the vocabulary"},
        "features": {**NUMBER, "description": "width of the features"},
        "vector": {**NUMBER, "description": "width of a vector, one for the whole sequence"},
        "length": {**NUMBER, "description": "tokens of a sequence, where it is fixed"},
        "sample_rate": {**NUMBER, "description": "tokens a second, in Hz: latency is then stated in milliseconds too"},
        "grid": {"description": "rows and columns, where the features are tokens of an image", **PAIR},
        "image": _object({"size": PAIR, "channels": NUMBER}, ["size"]),
    }
    description = "{tokens: vocabulary}, {features: width}, {vector: width} or {image: {size: 224, channels: 3}}"
    return {"description": description, **_object(kinds, [])}


def _block_definition(names: Schema) -> Schema:
    types = ", ".join(ARGUMENT_TYPES)
    keys: dict[str, Schema] = {
        "about": {"type": "string"},
        "args": {"description": f"arguments: a type ({types}) means required, a value is a default", "type": "object"},
        "let": {"type": "object"},
        "steps": STEPS,
        "checkpoint": names,
    }
    return _object({key: keys[key] for key in BLOCK_KEYS}, ["steps"])


def _expect() -> Schema:
    keys: dict[str, Schema] = dict.fromkeys(EXPECT_KEYS, NUMBER)
    axes = {"type": "array", "description": "axes, for instance [batch, 1000]"}
    keys["output"] = {**axes, "type": ["array", "object"], "additionalProperties": axes}
    keys["lookahead"] = {
        "description": "later tokens that an output may depend on: 0 in a causal model, all for the whole sequence",
        "anyOf": [NUMBER, {"const": "all"}],
    }
    keys["latency_ms"] = {**NUMBER, "description": "milliseconds that an output waits for later samples of the input"}
    return {"description": "what must be true of the spec", **_object(keys, [])}


def _checkpoint() -> Schema:
    one = [{"type": "string"}, *map(_recipe, RECIPES)]
    names = {"anyOf": [*one, {"description": "alternatives", "type": "array", "items": {"anyOf": one}}]}
    layout = {"type": "object", "additionalProperties": names}
    layouts = {
        "description": "further layouts, and what differs in each: {hub: {embed: backbone.embeddings}}",
        "anyOf": [{"type": "object", "additionalProperties": layout}, *names["anyOf"]],
    }
    return {
        "description": "our names -> those of an official release",
        "type": "object",
        "properties": {LAYOUTS: layouts},
        "additionalProperties": names,
    }


def _recipe(kind: str) -> Schema:
    """An official tensor, or several, made into ours."""
    string, number = {"type": "string"}, {"type": ["integer", "string"]}
    if kind == "rearrange":
        sizes = {"type": ["number", "string"], "description": "the size of an axis of the pattern"}
        return {**_object({kind: string, "pattern": string}, [kind, "pattern"]), "additionalProperties": sizes}
    several = issubclass(RECIPES[kind], FromSeveral)
    source: Schema = {"type": "array", "items": string, "minItems": 1} if several else string
    words = words_of(kind)
    several_numbers = {"type": "array", "items": number, "minItems": 1}
    numbers = {word: several_numbers if word in LISTS else number for word in words}
    return _object({kind: source, **numbers}, [kind, *filter(words.get, words)])


def _object(properties: dict[str, Schema], required: list[str]) -> Schema:
    out: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return out | {"required": required} if required else out


def _bundled_blocks() -> dict[str, Block]:
    found: dict[str, Block] = {}
    for name in bundled():
        found |= check.load_spec(name)[0].blocks
    return found


def _names(file: SpecFile) -> list[str]:
    """Everything that `let` and `args` name anywhere in a file: what may be written where a word is expected."""
    names = [key for key, _, _ in file.let or ()]
    for block in file.blocks.values():
        names += [*block.args, *(key for key, _, _ in block.let or ())]
    return list(dict.fromkeys(names))


# --- what a verb takes --------------------------------------------------------------------------------------------


def _verb(verb: Verb, words: list[str] | None) -> Schema:
    """`words`: what may be written where a word is expected; None: anything."""
    properties: dict[str, Schema] = {
        argument.name: {"description": argument.about, **_argument(argument, words)} for argument in arguments(verb)
    }
    required = [argument.name for argument in arguments(verb) if argument.required]
    for port in ports(verb):
        wires: Schema = {"type": ["string", "array"]} if port.joins else WIRE
        properties[port.name] = {**wires, "description": port.about}
        if is_required(port):
            required.append(port.name)
    properties |= {key: STEP_KEYS[key] for key in _step_keys(verb) if key not in properties}
    out = _takes(about(verb), properties, required)
    if issubclass(verb, Op):
        return _short(out | ({"additionalProperties": SIZE} if verb.open_keys else {}), required)
    return _combinator(verb, out)


def _step_keys(verb: Verb) -> list[str]:
    """The keys of STEP_KEYS that the verb allows."""
    left_out: set[str] = set()
    if issubclass(verb, Op):
        if not any(port.main for port in verb.ports):
            left_out = {"from"}
    else:
        left_out = {"tie"} if verb.takes_init else {"init", "tie"}
    return [key for key in STEP_KEYS if key not in left_out]


def _takes(description: str, properties: dict[str, Schema], required: list[str]) -> Schema:
    """A mapping of arguments; nothing at all where none is required."""
    kind: Any = "object" if required else ["object", "null"]
    return {"description": description, **_object(properties, required), "type": kind}


def _combinator(verb: type[Combinator], out: Schema) -> Schema:
    """A combinator takes a list of steps, or of branches, in place of its arguments: `residual: [silu]`."""
    properties = out["properties"]
    if "branches" in properties:
        branch = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": STEPS}
        description = properties["branches"]["description"]
        properties["branches"] = {"type": "array", "description": description, "items": branch}
    items = properties[verb.holds[0]].get("items", STEP)
    out |= {"additionalProperties": STEPS if verb.open_keys else False}
    if not {*out.get("required", ())} <= {verb.holds[0]}:
        return out
    return out | {"type": [*_types(out), "array"], "items": items}


def _short(out: Schema, required: list[str]) -> Schema:
    """Where one argument alone is required, its value may be written by itself: `linear: 64`."""
    if len(required) != 1:
        return out
    only = out["properties"][required[0]]
    if only == STEPS:
        return out | {"type": [*_types(out), "array"], "items": STEP}
    limits = {key: value for key, value in only.items() if key in (*LIMITS.values(), "not")}
    return out | limits | {"type": [*_types(out), *(kind for kind in _types(only) if kind != "array")]}


def _types(made: Schema) -> list[str]:
    found = made.get("type", "string")
    return found if isinstance(found, list) else [found]


def _argument(argument: Declared, words: list[str] | None) -> Schema:
    if argument.holds_steps:
        return STEPS
    match argument.kind.kind:
        case "number":
            return _number(argument)
        case "flag":
            return FLAG
        case kind:
            return _word(list(argument.kind.choices), kind == "words", None if argument.kind.open else words)


def _number(argument: Declared) -> Schema:
    types = ["integer" if argument.kind.whole else "number", "string"]
    if argument.default is None and not argument.required:
        types.append("null")
    return {"type": types} | {LIMITS[key]: float(value) for key, value in argument.limits.items()}


def _word(choices: list[str], many: bool, words: list[str] | None) -> Schema:
    if not choices:
        return {"type": "string"}
    options: list[Schema] = [{"enum": choices}, {"type": "string"}] if words is None else [{"enum": [*choices, *words]}]
    if many:
        options.append({"type": "array", "items": {"type": "string"}})
    return {"anyOf": options} if len(options) > 1 else options[0]


def _block(block: Block) -> Schema:
    properties = {a.name: _block_argument(a) for a in block.args.values()}
    properties |= {key: STEP_KEYS[key] for key in ("from", "as", "name", "share", "when")}
    required = [a.name for a in block.args.values() if a.default is None]
    return _short(_takes(block.about or f"the block {block.name}", properties, required), required)


def _arguments_that_are_steps(file: SpecFile | None) -> Iterator[Argument]:
    """Yield the arguments of a file's blocks that are verbs inside them. A schema cannot say where inside is."""
    for block in file.blocks.values() if file else ():
        yield from (argument for argument in block.args.values() if argument.type == "steps")


def _passed(argument: Argument) -> Schema:
    properties = {key: STEP_KEYS[key] for key in ("from", "as", "name", "share", "when")}
    return _takes(f"the steps that the block is called with as `{argument.name}`", properties, [])


def _block_argument(argument: Argument) -> Schema:
    match argument.type:
        case "int":
            return {"type": ["integer", "string"]}
        case "float":
            return NUMBER
        case "bool":
            return FLAG
        case "wire":
            return WIRE
        case "steps":
            return STEPS
    return {"type": ["string", "array"]} if argument.type == "word" else {}
