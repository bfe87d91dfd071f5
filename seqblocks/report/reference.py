"""The language reference, made from the declarations: `seqblocks ops`, and docs/language.md

(`python -m seqblocks.report.reference > docs/language.md`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from seqblocks.combinators import COMBINATORS, Combinator
from seqblocks.language.expressions import FUNCTIONS
from seqblocks.op import PRIMITIVES, FieldKind, Op, field_infos, fields_of, load_builtin, load_plugins
from seqblocks.parameters import INITIALISERS

Verb = type[Op] | type[Combinator]
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def verbs() -> dict[str, Verb]:
    """Every verb: combinators, then primitives, plug-ins included."""
    load_builtin()
    load_plugins()
    return {**COMBINATORS, **dict(sorted(PRIMITIVES.items()))}


def facts(verb: Verb) -> dict[str, Any]:
    """All that is declared about a verb, as plain data."""
    op = verb if issubclass(verb, Op) else None
    ports = op.ports if op else ()
    return {
        "verb": verb.verb,
        "kind": "primitive" if op else "combinator",
        "about": inspect.cleandoc(verb.__doc__ or ""),
        "arguments": [_argument(verb, name, kind) for name, kind in fields_of(verb).items()],
        "inputs": [
            {
                "name": "from" if port.main else port.name,
                "about": port.about,
                "kinds": list(port.kinds),
                "joins": port.joins,
                "required": not (port.main or port.optional),
            }
            for port in ports
        ],
        "reads": op.reads if op else None,
        "source": (op.source or None) if op else None,
    }


def _argument(verb: type[BaseModel], name: str, kind: FieldKind) -> dict[str, Any]:
    info = field_infos(verb)[name]
    required = info.is_required()
    default = None if required or info.default is PydanticUndefined else info.default
    limits = [f"{said} {getattr(m, key):g}" for m in info.metadata for key, said in _LIMITS.items() if hasattr(m, key)]
    return {
        "name": name,
        "type": _type(kind, name in getattr(verb, "holds", ())),
        "words": list(kind.choices),
        "required": required,
        "default": default,
        "limits": limits,
        "about": info.description or "",
    }


def _type(kind: FieldKind, holds: bool) -> str:
    if holds:
        return "steps"
    if kind.kind == "number":
        return "whole number" if kind.whole else "number"
    if kind.kind == "flag":
        return "true or false"
    if kind.kind == "words":
        return "word, or list of words"
    return "word"


def text(verb: Verb) -> str:
    """One verb, for a terminal."""
    told = facts(verb)
    out = [f"{told['verb']} ({told['kind']})", *("  " + line for line in told["about"].splitlines())]
    if told["inputs"]:
        out.append("inputs")
        out += [f"  {p['name']}{'' if p['required'] else ' (optional)'}: {_port(p)}" for p in told["inputs"]]
    if told["arguments"]:
        out.append("arguments")
        out += [f"  {a['name']}: {_kind(a)}{_default(a)}. {a['about']}" for a in told["arguments"]]
    if told["source"]:
        out.append(f"source: {told['source']}")
    return "\n".join(out)


def _port(port: dict[str, Any]) -> str:
    many = ", or a list of them" if port["joins"] else ""
    return f"{port['about']} ({' or '.join(port['kinds'])}{many})"


def _kind(argument: dict[str, Any]) -> str:
    words = " | ".join(argument["words"])
    kind = f"{words}{', or a list' if 'list' in argument['type'] else ''}" if words else argument["type"]
    return ", ".join([kind, *argument["limits"]])


def _default(argument: dict[str, Any]) -> str:
    if argument["required"]:
        return " (required)"
    default = argument["default"]
    return "" if default is None else f" (default {str(default).lower() if isinstance(default, bool) else default})"


# --- docs/language.md -----------------------------------------------------------------------------------------------

INTRODUCTION = """# The language

<!-- made by `python -m seqblocks.report.reference`; edit seqblocks/report/reference.py or the declarations instead -->

A spec is one YAML file. This page is the whole language; `seqblocks ops NAME` shows the part about one verb.

```yaml
seqblocks: 1                                # the version of the language
about: a small language model               # free text
use: [vil]                                  # blocks of other files: bundled by name, your own by path (./blocks.yaml)
let: {dim: 64, layers_wanted: 2}            # names for numbers, words, flags and lists

blocks:                                     # verbs of your own
  feed_forward:
    about: a gated feed-forward network in a residual branch
    args: {dim: int, expand: 2.667}         # a type means required: int, float, bool, word, wire; a value is a default
    let: {hidden: "round_up(expand * dim, 64)"}
    steps:
      - residual: {steps: [layer_norm, {swiglu: {hidden: hidden}}]}

model:
  input: {tokens: 256}                      # or {features: 64}, or {image: {size: 224, channels: 3}}; length: 40
                                            # beside the first two, or grid: [5, 8] beside features, where a step
                                            # must know it
  steps:
    - embed: {features: dim}
    - repeat:
        name: blocks
        times: layers_wanted
        steps:
          - vil: {dim: dim}
          - feed_forward: {dim: dim}
    - layer_norm: {bias: false}
    - unembed: {bias: false, tie: embed}

expect: {params: 150_736}                   # what must be true, or the spec does not validate
```

A file holds `blocks:`, a `model:`, or both. Wherever order matters there is a list, so a tool that sorts keys cannot
change a model.

## The YAML

YAML 1.2 with its core scalars: `7:1`, `on` and `no` are words, `1e-3` is a number. One document in a file, UTF-8. Not part
of the language: tags, merge keys (`<<`), duplicate keys. Aliases work and are bounded. A comma inside braces ends a value,
so a call with a comma is quoted there: `{features: "round_up(2 * dim, 64)"}`; in block style it needs no quotes.

## use

`use:` brings in the blocks of other files: bundled ones by name, your own by path. A path starts at the folder of the file
that holds it (for a spec given as text or on standard input, at the working directory), and must end in `.yaml` or `.yml`.
Only files below the folder of the spec are read, links followed, so a spec from somewhere else cannot show what your other
files hold. To use a library that lies elsewhere, allow its folder: `seqblocks check --allow-use ../library my.yaml`, or
`seqblocks.build("my.yaml", allow_use="../library")`. A saved model carries the files it uses; `restore` reads no others.

## Steps

A step is one verb with its arguments: `- layer_norm: {bias: false}`, or just `- silu`. A verb that needs one argument alone
takes it directly, `- linear: 64` for `- linear: {features: 64}`, and a combinator its list of steps (or branches):
`- residual: [layer_norm, {linear: dim}]`. Verbs are primitives, combinators and blocks; all are written alike. `seqblocks ops mlstm_block` lists the arguments of a bundled block, `seqblocks ops
my.yaml::my_block` those of your own, and `seqblocks show xlstm --source` prints the YAML of a bundled file. Every step may have

- `from: name` (or `x: name`): the wire it reads, instead of the output of the step before. `input` is what the enclosing
  list of steps was given. Some verbs take a list, and join the wires along the features. What one step reads has one number
  of tokens.
- `as: name`: a name for its output. `as: [a, b]` cuts the features into equal parts, `as: {a: 96, b: dim}` into parts of
  these widths. The features of an image are its channels; token numbers have none, and are neither cut, joined nor added.
- `name: name`: its namespace, see below.
- `init: {parameter: initialiser}`: how a primitive's parameters start, or those that one order of a scan owns. Numbers are
  given in order or by name: `normal(0, 0.02)`, `normal(std=0.02)`.
- `tie: step`, or `tie: {parameter: step.parameter}`: parameters that are those of a step above, and counted once.

Wires of the enclosing steps are visible inside `residual`, `scan`, `parallel` and `repeat`; a block sees only its own
input and its arguments of type `wire`. Names made inside are not visible outside.

## Names

A parameter's name in the `state_dict` is made of the namespaces around it. A step's namespace is its `name:`, else its
single `as:` name, else its verb; `repeat` adds the layer's index, `parallel` the branch's name, and a `scan` with several
orders adds the order's name to what each order owns. Two steps of one body that would share
a namespace are an error, activations too; it says which `name:` to add.
In the example: `blocks.0.vil.residual.scan.q.weight`, `blocks.1.feed_forward.residual.swiglu.up_weight`.

## Numbers

Wherever a number is needed an expression may stand: numbers, names from `let`, `args` and the enclosing `repeat`
(`layer`, `layers`), `+ - * / // % **`, comparisons, `a if c else b` (c a comparison or a flag), parentheses, and the functions FUNCTIONS.
`384 / 2` is the whole number 192; `5 / 2` is 2.5, which is an error where a whole number is needed.
Nothing is evaluated by Python; size, depth and magnitude are bounded. Whether a value is an expression, a word or a wire
is decided by what the argument takes: a legal word means itself, anything else is looked up.

## Overrides

`--set dim=96` (or `set={"dim": 96}` in Python) replaces a value by its name: an entry of `let`, `blocks.NAME.ARGUMENT` for
a default, or the path of a step by namespaces, such as `model.blocks.feed_forward.expand=4` (a bare step goes by its verb:
`model.layer_norm.eps=1e-6`); inside a `pattern` its word is part of
the path, not the layer's number: `model.blocks.m.mlstm_block.heads=8`. `input.image.size=[64, 64]` works likewise. Defaults of
files in `use:` are not changed from outside: give the argument where the block is used.

An override that changes something switches `expect:` off. One that changes nothing is told: the command writes a note to
standard error (the exit status stays what it is), and Python warns with `OverrideWarning` where no step uses the value. That
the spec says the same already is noted by the command alone: a sweep passes through it.

## expect

`params`, `state_bytes` (of one sequence, float32), `flops_per_token`, `output` (a list of axes), `lookahead` (below), and
`tolerance` (relative, default 0; for the first three). A spec that breaks its own expectation ends with exit status 3.

The **lookahead** is how many later tokens of the input an output may depend on: 0 in a causal model, `all` where it is the
whole sequence. A token that stands for several of the input's (after `downsample`) stands where the first of them does, so
`downsample: {factor: 4}` followed by `upsample: {factor: 4}` looks 3 tokens ahead; it still streams, 4 tokens at a time.
A summary says `causal: yes`, or how far an output sees and by which step. It says nothing of a model that reads an image
or gives a vector.

## Unused steps

A step with parameters must be used: its output, or one part of it, reaches the result, or a step that does. Otherwise its
parameters would be counted and stored, and never trained (E315). Parameters that a used step ties to count as used.

## checkpoint

Maps names of ours to those of an official release, so that `seqblocks.checkpoint.load_official` can read its weights. A key
is a parameter or a namespace (then everything below it), `{layer}` matches an index and may be used in an expression on the
other side. A key that names nothing is an error, unless a block's arguments or an override may have left it out (a parameter,
a layer, a direction). Of two keys the longer one counts, and of two equally long ones a fixed part (`layers.0`) before an index
(`layers.{layer}`). Official names are words: `"0"`, not `0`.

A block's map covers the names inside the block, wherever the block is used: in a `residual`, a `scan`, a `repeat` or another
block. The longest matching key of the enclosing map translates the part of a name that it matches; the rest is translated by the
maps of the blocks it passes through. A key of the enclosing map that reaches into a block takes precedence over the block's own
map, for what it matches. An entry that can never apply is an error (E314).

```yaml
checkpoint:
  patch_embed: patch_embed.proj
  embed: [embedding, backbone.embeddings]               # alternatives: the first one that the file holds
  blocks.{layer}.vil: blocks.{layer}
  qkv.weight: {concat: [q.weight, k.weight, v.weight], axis: 0}
  kv.weight: {split: fused.weight, parts: 2, part: 1}   # the second of two equal parts
  o.weight: {slice: fused.weight, start: 192}           # as many rows as ours has, from there on
  out.weight: {transpose: out.weight}
  table: {reshape: pos_embed}
  gate.weight: {rearrange: gate.kernel, pattern: "(head part width) gate -> gate (part head width)", head: heads, part: 3}
  A_real: {real: A}                                     # of a complex tensor; imag likewise
```

An official tensor has the very shape that ours implies: parts of a `split` are joined or stacked along the axis, or all flat, and
only `reshape` reshapes. The sizes of a `rearrange` (einops' notation) are numbers or expressions over the block's arguments; one
size per group may be left open. A matrix called `kernel` is [in, out], as flax and Keras have it, and must be transposed. What is
tied may be in the release once, by either name, or twice.
"""


def markdown() -> str:
    """The page."""
    every = verbs()
    functions = ", ".join(f"`{name}`" for name in FUNCTIONS)
    out = [INTRODUCTION.replace("FUNCTIONS", functions), "## Combinators\n"]
    for name, combinator in COMBINATORS.items():
        out += [*_section(combinator), f"```yaml\n{EXAMPLES[name]}```\n"]
    out.append("## Primitives\n")
    for verb in every.values():
        if issubclass(verb, Op) and verb.builtin:
            out += _section(verb)
    out += ["## Initialisers\n", "| name | draws |", "|---|---|"]
    for name, known in INITIALISERS.items():
        arguments = ", ".join(a if default is None else f"{a}={default:g}" for a, default in known.arguments)
        out.append(f"| `{name}{f'({arguments})' if arguments else ''}` | {known.about} |")
    return "\n".join(out) + "\n"


def _section(verb: Verb) -> Iterator[str]:
    told = facts(verb)
    yield f"### {told['verb']}\n"
    yield told["about"] + "\n"
    for port in told["inputs"]:
        if port["name"] != "from" or port["joins"] or port["kinds"] != ["sequence"]:
            optional = "" if port["required"] or port["name"] == "from" else ", optional"
            yield f"- input `{port['name']}`{optional}: {_port(port)}"
    if told["source"]:
        yield f"- source: {told['source']}"
    if told["arguments"]:
        yield "\n| argument | takes | default | |\n|---|---|---|---|"
        for argument in told["arguments"]:
            default = "required" if argument["required"] else _cell(argument["default"])
            yield f"| `{argument['name']}` | {_kind(argument).replace('|', chr(92) + '|')} | {default} | {argument['about']} |"
    yield ""


def _cell(default: Any) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


EXAMPLES = {
    "residual": """- residual:
    drop_path: 0.1
    steps:
      - layer_norm
      - linear: {features: dim}
""",
    "scan": """- scan:
    order: [forward, reverse]
    merge: concat
    own: [c.weight]               # stored as scan.fwd.c.weight and scan.rev.c.weight
    steps:
      - causal_conv: {kernel: 4, as: c}
- proj_down: {features: dim}
""",
    "parallel": """- parallel:
    merge: sum
    branches:
      - wide: [{swiglu: {hidden: 4 * dim}}]
      - local: [{causal_conv: {kernel: 3}}]
""",
    "repeat": """- repeat:
    name: blocks
    pattern: m*3 s m              # five layers; `times: 2` would make it ten
    m: [{vil: {dim: dim, drop_path: 0.1 * layer / (layers - 1)}}]
    s: [{residual: {steps: [layer_norm, {swiglu: {hidden: 2 * dim}}]}}]
""",
}

if __name__ == "__main__":
    print(markdown(), end="")
