"""A JSON schema (draft 7) of the language for editors, made from the declarations.

Two things a schema cannot see from inside a file: which blocks the file defines and uses, and which names `let` and
`args` give. The general schema therefore leaves verbs and words open that it does not know, so that a correct file
never gets an alarm; `schema(file)` knows them for one file, and closes both, so that a misspelt one is flagged too.

pydantic's own schema would not do: its unions make editors alarm on correct files and offer no completions.
"""

from __future__ import annotations

from typing import Any

from seqblocks.analysis import check
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
from seqblocks.recipes import RECIPES, FromSeveral, words_of
from seqblocks.report.reference import Verb, facts, verbs

Schema = dict[str, Any]
STEPS: Schema = {"$ref": "#/definitions/steps"}
STEP: Schema = {"$ref": "#/definitions/step"}
WIRE: Schema = {"type": "string", "description": "the name of a wire"}
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "not")
_FALSE_FRIENDS = {"not": {"enum": ["yes", "no", "on", "off"]}}


def schema(file: SpecFile | None = None) -> Schema:
    """The schema: for one file, or general."""
    words = _names(file) if file else None
    blocks = file.visible if file else _bundled_blocks()
    table: dict[str, Schema] = {name: _verb(verb, words) for name, verb in verbs().items()}
    table |= {name: _block(block, words) for name, block in blocks.items()}
    bare = [name for name, made in table.items() if not made.get("required")]
    step: Schema = {
        "if": {"type": "string"},
        # a closed list flags a misspelt verb; an open one only offers the verbs
        "then": {"enum": bare} if file else {"anyOf": [{"enum": bare}, {"type": "string"}]},
        "else": {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "properties": {name: {"$ref": f"#/definitions/verbs/{name}"} for name in table},
            "additionalProperties": not file,
        },
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "seqblocks",
        "type": "object",
        "required": ["seqblocks"],
        "properties": _top(),
        "additionalProperties": False,
        "definitions": {
            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}},
            "step": step,
            "verbs": table,
        },
    }


def _top() -> dict[str, Schema]:
    number = {"type": ["number", "string"]}
    model: dict[str, Schema] = {
        "about": {"type": "string"},
        "input": {
            "description": "{tokens: vocabulary}, {features: width} or {image: {size: 224, channels: 3}}",
            "type": "object",
            "properties": {
                "tokens": {**number, "description": "size of the vocabulary"},
                "features": {**number, "description": "width of the features"},
                "length": {**number, "description": "tokens of a sequence, where it is fixed"},
                "grid": {"description": "rows and columns, where the features are tokens of an image", **_pair()},
                "image": {
                    "type": "object",
                    "properties": {"size": _pair(), "channels": number},
                    "required": ["size"],
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "steps": STEPS,
    }
    one = [{"type": "string"}, *map(_recipe, RECIPES)]
    official = {"anyOf": [*one, {"description": "alternatives", "type": "array", "items": {"anyOf": one}}]}
    names: Schema = {
        "description": "our names -> those of an official release", "type": "object", "additionalProperties": official,
    }  # fmt: skip
    block: dict[str, Schema] = {
        "about": {"type": "string"},
        "args": {
            "description": f"arguments: a type ({', '.join(ARGUMENT_TYPES)}) means required, a value is a default",
            "type": "object",
        },
        "let": {"type": "object"},
        "steps": STEPS,
        "checkpoint": names,
    }
    expect: dict[str, Schema] = {name: number for name in EXPECT_KEYS if name not in ("output", "lookahead")}
    expect["output"] = {"type": "array", "description": "axes, for instance [batch, 1000]"}
    expect["lookahead"] = {
        "description": "later tokens that an output may depend on: 0 in a causal model, all for the whole sequence",
        "anyOf": [number, {"const": "all"}],
    }
    top: dict[str, Schema] = {
        "seqblocks": {"const": VERSION, "description": "the version of the language"},
        "about": {"type": "string"},
        "use": {
            "description": "blocks of other files: bundled ones by name, your own by path",
            "type": "array",
            "items": {"anyOf": [{"enum": list(bundled())}, {"type": "string"}]},
        },
        "let": {"type": "object", "description": "names for numbers, words, flags and lists"},
        "blocks": {
            "type": "object",
            "description": "verbs of your own",
            "additionalProperties": _object({k: block[k] for k in BLOCK_KEYS}, ["steps"]),
        },
        "model": _object({k: model[k] for k in MODEL_KEYS}, ["input", "steps"]),
        "expect": {"description": "what must be true of the spec", **_object({k: expect[k] for k in EXPECT_KEYS}, [])},
        "checkpoint": names,
    }
    return {key: top[key] for key in FILE_KEYS}


def _recipe(kind: str) -> Schema:
    """An official tensor, or several, made into ours."""
    string, integer = {"type": "string"}, {"type": "integer"}
    if kind == "rearrange":
        sizes = {"type": ["number", "string"], "description": "the size of an axis of the pattern"}
        return {**_object({kind: string, "pattern": string}, [kind, "pattern"]), "additionalProperties": sizes}
    several = issubclass(RECIPES[kind], FromSeveral)
    source: Schema = {"type": "array", "items": string, "minItems": 1} if several else string
    words = words_of(kind)
    return _object({kind: source, **dict.fromkeys(words, integer)}, [kind, *filter(words.get, words)])


def _object(properties: dict[str, Schema], required: list[str]) -> Schema:
    out: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return out | {"required": required} if required else out


def _pair() -> Schema:
    return {"type": ["number", "string", "array"]}


def _bundled_blocks() -> dict[str, Block]:
    found: dict[str, Block] = {}
    for name in bundled():
        found |= check.load(name)[0].blocks
    return found


def _names(file: SpecFile) -> list[str]:
    """Everything that `let` and `args` name anywhere in a file: what may stand where a word is expected."""
    names = [key for key, _, _ in file.let or ()]
    for block in file.blocks.values():
        names += [*block.args, *(key for key, _, _ in block.let or ())]
    return list(dict.fromkeys(names))


def _verb(verb: Verb, words: list[str] | None) -> Schema:
    told = facts(verb)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for argument in told["arguments"]:
        name = argument["name"]
        properties[name] = {"description": argument["about"], **_argument(argument, words)}
        if argument["required"]:
            required.append(name)
    if issubclass(verb, Op):
        for port in verb.ports:
            wires: Schema = {"type": ["string", "array"]} if port.joins else WIRE
            properties[port.name] = {**wires, "description": port.about}
            if not port.main and not port.optional:
                required.append(port.name)
        named_only = not any(port.main for port in verb.ports)
    else:
        named_only = False
    properties |= {key: made for key, made in _common().items() if not (key == "from" and named_only)}
    if not issubclass(verb, Op):
        for key in ("tie",) if verb.takes_init else ("init", "tie"):
            properties.pop(key)
    out: Schema = {
        "description": told["about"],
        "type": "object" if required else ["object", "null"],
        "properties": properties,
        "additionalProperties": STEPS if getattr(verb, "open_keys", False) else False,
    }
    if "branches" in properties:
        properties["branches"] = {
            "type": "array",
            "description": properties["branches"]["description"],
            "items": {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": STEPS},
        }
    if not issubclass(verb, Op):  # `residual: [silu]`
        held = properties[verb.holds[0]]
        out |= {"type": [*_types(out), "array"], "items": held.get("items", STEP)}
        return out | {"required": required} if required else out
    return _short(out, properties, required)


def _types(made: Schema) -> list[str]:
    found = made.get("type", "string")
    return found if isinstance(found, list) else [found]


def _short(out: Schema, properties: dict[str, Schema], required: list[str]) -> Schema:
    """What a verb takes; where it needs one argument alone, that may stand by itself: `linear: 64`."""
    if len(required) == 1:
        only = properties[required[0]]
        limits = {key: value for key, value in only.items() if key in LIMITS}
        out |= {**limits, "type": [*_types(out), *(kind for kind in _types(only) if kind != "array")]}
    return out | {"required": required} if required else out


def _argument(argument: dict[str, Any], words: list[str] | None) -> Schema:
    kind = argument["type"]
    if kind == "steps":
        return STEPS
    if kind.endswith("number"):
        out: Schema = {"type": ["integer" if kind == "whole number" else "number", "string"]}
        for limit in argument["limits"]:
            word, _, value = limit.rpartition(" ")
            key = {"at least": "minimum", "more than": "exclusiveMinimum", "at most": "maximum"}.get(
                word, "exclusiveMaximum"
            )
            out[key] = float(value)
        return out | (
            {"type": [*out["type"], "null"]} if argument["default"] is None and not argument["required"] else {}
        )
    if kind == "true or false":
        return {"type": ["boolean", "string"], **_FALSE_FRIENDS}
    return _word(argument["words"], "list" in kind, words)


def _word(choices: list[str], many: bool, words: list[str] | None) -> Schema:
    if not choices:
        return {"type": "string"}
    open_or_closed: Schema = (
        {"anyOf": [{"enum": choices}, {"type": "string"}]} if words is None else {"enum": [*choices, *words]}
    )
    if not many:
        return open_or_closed
    options = open_or_closed.get("anyOf", [open_or_closed])
    return {"anyOf": [*options, {"type": "array", "items": {"type": "string"}}]}


def _common() -> dict[str, Schema]:
    return {
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
    }


def _block(block: Block, words: list[str] | None) -> Schema:
    properties: dict[str, Schema] = {a.name: _block_argument(a) for a in block.args.values()}
    properties |= {key: made for key, made in _common().items() if key in ("from", "as", "name")}
    required = [a.name for a in block.args.values() if a.default is None]
    out: Schema = {
        "description": block.about or f"the block {block.name}",
        "type": "object" if required else ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }
    return _short(out, properties, required)


def _block_argument(argument: Argument) -> Schema:
    match argument.type:
        case "int":
            return {"type": ["integer", "string"]}
        case "float":
            return {"type": ["number", "string"]}
        case "bool":
            return {"type": ["boolean", "string"], **_FALSE_FRIENDS}
        case "wire":
            return WIRE
    return {"type": ["string", "array"]} if argument.type == "word" else {}
