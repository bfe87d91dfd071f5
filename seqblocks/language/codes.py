"""The catalogue of error codes: `seqblocks explain E401`.

`example` is a faulty spec that gets the code, `fix` the same spec mended. Two dots stand for the frame

    seqblocks: 1
    model:
      input: {features: 8}
      steps:
        ..
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """What a code means. `example` and `fix` are specs, or empty where files or machines are at fault."""

    title: str
    about: str
    example: str = ""
    fix: str = ""


FRAME = "seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n"


def framed(text: str) -> str:
    """An example as a whole spec."""
    if not text.startswith("- "):
        return text
    return FRAME + "".join(f"    {line}\n" for line in text.splitlines())


HEAD = "seqblocks: 1\n"
MODEL = "model: {input: {features: 8}, steps: [silu]}\n"

CODES: dict[str, Code] = {
    # the document
    "E101": Code(
        "not YAML",
        "The text cannot be read as YAML at all: a bracket is open, a tab indents, an alias has no anchor.",
        HEAD + "model: {input: {features: 8}, steps: [silu]\n",
        HEAD + MODEL,
    ),
    "E102": Code(
        "a key appears twice",
        "YAML would keep one of the two silently; which one, depends on the tool. Keep one.",
        HEAD + "let: {dim: 8, dim: 16}\n" + MODEL,
        HEAD + "let: {dim: 16}\n" + MODEL,
    ),
    "E103": Code("not UTF-8", "Specs are UTF-8 text. Save the file in that encoding."),
    "E104": Code(
        "too large",
        "Text, nesting (of YAML, and of blocks in blocks), nodes after aliases, and steps of a model are bounded, so "
        "that no file can hang a tool.",
        HEAD + "let: " + "[" * 60 + "]" * 60 + "\n",
        HEAD + "let: {a: []}\n" + MODEL,
    ),
    "E105": Code(
        "a second document",
        "A file holds one document. Put the other into a file of its own, and bring its blocks in with `use:`.",
        HEAD + MODEL + "---\nseqblocks: 1\n",
        HEAD + MODEL,
    ),
    "E106": Code(
        "a tag",
        "Tags (`!!int`, `!!python/…`) make a YAML reader build objects. The language has none.",
        HEAD + "let: {dim: !!int 8}\n" + MODEL,
        HEAD + "let: {dim: 8}\n" + MODEL,
    ),
    "E107": Code(
        "a merge key",
        "`<<` is not part of YAML 1.2, and hides where a value comes from. Write the keys out, or use a block.",
        HEAD + "let:\n  <<: {dim: 8}\n" + MODEL,
        HEAD + "let:\n  dim: 8\n" + MODEL,
    ),
    "E108": Code("empty", "There is nothing in the text but comments.", "# nothing\n", HEAD + MODEL),
    "E109": Code("a forbidden character", "YAML allows no control characters but tab and line breaks."),
    "E110": Code(
        "a comma inside braces",
        "Inside `{ }` a comma ends the value, so a call with a comma is torn in two. Quote it there; in block style "
        "it needs no quotes.",
        "- linear: {features: round_up(9, 8)}",
        '- linear: {features: "round_up(9, 8)"}',
    ),
    "E112": Code("a key that is not a word", "Keys are plain words.", HEAD + "? [a]\n: 1\n" + MODEL, HEAD + MODEL),
    # structure
    "E201": Code(
        "an unknown key",
        "Nothing here takes this key. Keys are never ignored: a misspelt one would leave the default in force.",
        "- linear: {featurs: 4}",
        "- linear: {features: 4}",
    ),
    "E202": Code(
        "something is missing",
        "A verb, a block or the model needs this, and it is not there.",
        "- linear: {bias: false}",
        "- linear: {features: 4, bias: false}",
    ),
    "E203": Code(
        "another kind of value",
        "The value is of a kind that this place does not take: a list for a number, a word for a truth value.",
        "- linear: {features: [4]}",
        "- linear: {features: 4}",
    ),
    "E204": Code(
        "not a step",
        "A step is one verb, alone or with a mapping of arguments. Two keys side by side are usually arguments that "
        "are not indented below their verb.",
        "- linear:\n  features: 4",
        "- linear:\n    features: 4",
    ),
    "E205": Code("the version", "A spec begins with the version of the language.", MODEL, HEAD + MODEL),
    "E206": Code(
        "nothing to build",
        "The file has neither blocks nor a model; or a model is wanted and there are only blocks.",
        HEAD + "about: nothing\n",
        HEAD + MODEL,
    ),
    "E207": Code(
        "not a name",
        "Names are letters, digits and _, do not begin with a digit, and have at most 64 characters.",
        "- linear: {features: 4, name: 1st}",
        "- linear: {features: 4, name: first}",
    ),
    "E208": Code(
        "not a legal word",
        "The argument takes one of a few words (or a name that stands for one of them).",
        "- gate: {by: input, activation: siluu}",
        "- gate: {by: input, activation: silu}",
    ),
    "E209": Code(
        "out of range", "The number lies outside what the argument takes.", "- dropout: {p: 2}", "- dropout: {p: 0.2}"
    ),
    "E210": Code(
        "given twice",
        "Two keys say the same thing, or exclude each other.",
        "- linear: {features: 8, as: a}\n- gate: {from: a, x: a, by: a}",
        "- linear: {features: 8, as: a}\n- gate: {from: a, by: a}",
    ),
    # names
    "E301": Code(
        "an unknown verb",
        "No primitive, combinator, block in sight or plug-in has this name. `seqblocks ops` lists the verbs; blocks of "
        "other files come in with `use:`, primitives of your own with `--import my_ops.py` (in Python, with "
        "`import` before building).",
        "- siluu",
        "- silu",
    ),
    "E302": Code(
        "an unknown wire",
        "No step above has this name. Wires are named with `as:`; those made inside a combinator stay inside it.",
        "- linear: {features: 8, as: query}\n- gate: {by: qurey}",
        "- linear: {features: 8, as: query}\n- gate: {by: query}",
    ),
    "E303": Code(
        "an unknown name",
        "An expression names something that neither `let`, nor `args`, nor an enclosing `repeat` defines.",
        HEAD + "let: {dim: 8}\nmodel: {input: {features: 8}, steps: [{linear: {features: dmi}}]}\n",
        HEAD + "let: {dim: 8}\nmodel: {input: {features: 8}, steps: [{linear: {features: dim}}]}\n",
    ),
    "E304": Code(
        "two steps of one name",
        "Parameters are stored under their step's name, and a second one may not be renamed silently: a step put in "
        "above would change it, and with it what saved weights, states and overrides go by. The hint says what to "
        "write.",
        "- linear: {features: 8}\n- linear: {features: 8}",
        "- linear: {features: 8}\n- linear: {features: 8, name: second}",
    ),
    "E305": Code(
        "two wires of one name",
        "A wire of this name is already in sight.",
        "- linear: {features: 8, as: a, name: one}\n- linear: {features: 8, as: a, name: two}",
        "- linear: {features: 8, as: a}\n- linear: {features: 8, as: b}",
    ),
    "E306": Code(
        "`use` finds nothing",
        "No bundled spec has this name, and a file is named by its path (./blocks.yaml).",
        HEAD + "use: [vill]\n" + MODEL,
        HEAD + "use: [vil]\n" + MODEL,
    ),
    "E307": Code("files use each other", "Files may not use each other in a ring. Move what both need to a third."),
    "E308": Code(
        "a block uses itself",
        "A block that holds itself would never end. `repeat` is the way to have layers.",
        HEAD + "blocks: {a: {steps: [a]}}\n",
        HEAD + "blocks: {a: {steps: [silu]}}\n",
    ),
    "E309": Code(
        "defined twice",
        "Two blocks have one name, or a block has the name of a built-in verb.",
        HEAD + "blocks: {silu: {steps: [gelu]}}\n",
        HEAD + "blocks: {mine: {steps: [gelu]}}\n",
    ),
    "E310": Code(
        "an override finds nothing",
        "`--set` replaces what the spec says, addressed by names, or gives a step an argument; it adds nothing else.",
    ),
    "E311": Code(
        "a reserved name",
        "The name means something already: to the language, to expressions, or to every torch module.",
        "- linear: {features: 4, name: train}",
        "- linear: {features: 4, name: trained}",
    ),
    "E312": Code(
        "an unknown parameter",
        "`tie:`, `own:` or a key of `checkpoint:` names a step or a parameter that is not there.",
        "- scan: {order: [forward, reverse], own: [conv], steps: [causal_conv]}",
        "- scan: {order: [forward, reverse], own: [causal_conv], steps: [causal_conv]}",
    ),
    "E313": Code(
        "one of several wires",
        "The step above gives out several wires, and this one must say which it reads.",
        "- linear: {features: 8, as: [a, b]}\n- silu",
        "- linear: {features: 8, as: [a, b]}\n- silu: {from: a}",
    ),
    "E314": Code(
        "a map entry that cannot apply",
        "An entry of `checkpoint:` would never be read, or would read a tensor wrongly: longer keys take all that it "
        "matches, a recipe meets a recipe of a block's own map, or a matrix called `kernel` is not transposed.",
        HEAD + "model: {input: {features: 8}, steps: [linear: {features: 8}]}\n"
        "checkpoint: {linear: a, linear.weight: b, linear.bias: c}\n",
        HEAD + "model: {input: {features: 8}, steps: [linear: {features: 8}]}\n"
        "checkpoint: {linear: a, linear.bias: c}\n",
    ),
    "E315": Code(
        "an unused step",
        "The step has parameters, and nothing uses its output: they would be counted and stored, and never trained. "
        "A step is used if its output, or one part of it, reaches the result.",
        "- linear: {features: 4, as: a}\n- linear: {from: input, features: 8, as: b}",
        "- linear: {features: 4, as: a}\n- linear: {from: [input, a], features: 8, as: b}",
    ),
    # shapes
    "E401": Code(
        "does not divide",
        "A number of heads, a block or a patch must divide a width. The hint names numbers that do.",
        "- head_norm: {heads: 3}",
        "- head_norm: {heads: 4}",
    ),
    "E402": Code(
        "another width",
        "An input must have a certain width. The notes say which step made the one that arrives.",
        "- linear: {features: 4, as: a}\n- gate: {from: input, by: a}",
        "- linear: {features: 8, as: a}\n- gate: {from: input, by: a}",
    ),
    "E403": Code(
        "another kind of wire",
        "Images, token numbers, sequences and vectors are different things; most verbs read sequences.",
        "- pool\n- causal_conv",
        "- causal_conv\n- pool",
    ),
    "E404": Code(
        "a residual that does not fit",
        "A residual adds what its steps make to what it was given, so both have one shape.",
        "- residual: {steps: [{linear: {features: 16}}]}",
        "- residual: {steps: [{linear: {features: 16}}, {proj_down: {features: 8}}]}",
    ),
    "E405": Code(
        "a split that does not fit",
        "`as:` cuts the features into equal parts, or into widths that add up to all of them.",
        "- linear: {features: 9, as: [a, b]}\n- silu: {from: a}",
        "- linear: {features: 10, as: [a, b]}\n- silu: {from: a}",
    ),
    "E406": Code(
        "branches that do not fit",
        "Results that are merged or joined must agree in everything (for concat: in everything but the features).",
        "- parallel: {branches: [{a: [silu]}, {b: [{linear: {features: 4}}]}]}",
        "- parallel: {merge: concat, branches: [{a: [silu]}, {b: [{linear: {features: 4}}]}]}",
    ),
    "E407": Code(
        "no grid",
        "The verb, or the order, needs to know the rows and columns of an image's tokens.",
        "- conv2d",
        HEAD + "model: {input: {features: 8, grid: [2, 3]}, steps: [conv2d]}\n",
    ),
    "E408": Code(
        "not an initialiser",
        "`init:` takes the name of an initialiser with its numbers: zeros, normal(0, 0.02), linspace(3, 6).",
        "- linear: {features: 4, init: {weight: zeroes}}",
        "- linear: {features: 4, init: {weight: zeros}}",
    ),
    "E409": Code(
        "a tie that does not fit",
        "Tied parameters are one tensor, so they have one shape.",
        "- linear: {features: 4, name: a}\n- linear: {features: 4, name: b, tie: {weight: a.weight}}",
        "- linear: {features: 8, name: a}\n- linear: {features: 8, name: b, tie: {weight: a.weight}}",
    ),
    "E410": Code(
        "a list of wires",
        "`linear` joins several wires; other inputs take one. What the branches of one `parallel` make is joined by "
        "merge: concat.",
        "- linear: {features: 8, as: a}\n- layer_norm: {from: [a, input]}",
        "- linear: {features: 8, as: a}\n- linear: {from: [a, input], features: 8}",
    ),
    "E411": Code(
        "an input is missing",
        "The verb has named inputs, and one of them is not given.",
        "- gate",
        "- gate: {by: input}",
    ),
    "E412": Code(
        "a size that does not fit",
        "A kernel, a length or a number of positions cannot be what it is here.",
        HEAD + "model: {input: {features: 8, grid: [2, 3]}, steps: [{conv2d: {kernel: 4}}]}\n",
        HEAD + "model: {input: {features: 8, grid: [2, 3]}, steps: [{conv2d: {kernel: 3}}]}\n",
    ),
    # numbers
    "E501": Code(
        "not an expression",
        "Expressions have numbers, names, + - * / // % **, comparisons, `a if c else b`, and a few functions.",
        "- linear: {features: 2 ^ 3}",
        "- linear: {features: 2 ** 3}",
    ),
    "E502": Code(
        "no value",
        "The expression divides by zero, or a function has no value there.",
        "- linear: {features: 1 / 0}",
        "- linear: {features: 1 / 1}",
    ),
    "E503": Code(
        "not a whole number",
        "A width, a count or a kernel is a whole number.",
        "- linear: {features: 5 / 2}",
        "- linear: {features: 5 // 2}",
    ),
    "E504": Code(
        "too large a number",
        "Expressions are bounded in length and depth, and every number in magnitude (10^18).",
        "- linear: {features: 9 ** 60}",
        "- linear: {features: 9 ** 2}",
    ),
    "E505": Code(
        "a ring of names",
        "Entries of `let` need each other, so none of them has a value.",
        HEAD + "let: {a: b + 1, b: a - 1}\n" + MODEL,
        HEAD + "let: {a: b + 1, b: 1}\n" + MODEL,
    ),
    # repeat
    "E601": Code(
        "not a pattern",
        "A pattern is words with counts: `m*7 s`.",
        "- repeat: {pattern: m*x, m: [silu]}",
        "- repeat: {pattern: m*2, m: [silu]}",
    ),
    "E602": Code(
        "a word without steps",
        "Every word of a pattern is a key that holds its steps.",
        "- repeat: {pattern: m s, m: [silu]}",
        "- repeat: {pattern: m s, m: [silu], s: [gelu]}",
    ),
    "E603": Code(
        "steps without a word",
        "A key holds steps, and the pattern never asks for them.",
        "- repeat: {pattern: m, m: [silu], s: [gelu]}",
        "- repeat: {pattern: m s, m: [silu], s: [gelu]}",
    ),
    "E604": Code(
        "too many layers",
        "A repeat has at most 4096 layers.",
        "- repeat: {pattern: m*9000, m: [silu]}",
        "- repeat: {pattern: m*9, m: [silu]}",
    ),
    # expect
    "E701": Code(
        "other parameters than expected",
        "The spec does not have the parameters that its `expect:` states. The hint names the largest parts.",
        framed("- linear: {features: 8}") + "expect: {params: 70}\n",
        framed("- linear: {features: 8}") + "expect: {params: 72}\n",
    ),
    "E702": Code(
        "another state than expected",
        "The state of one sequence, in bytes of float32, is not what `expect:` states.",
        framed("- causal_conv: {kernel: 4}") + "expect: {state_bytes: 100}\n",
        framed("- causal_conv: {kernel: 4}") + "expect: {state_bytes: 96}\n",
    ),
    "E703": Code(
        "other costs than expected",
        "FLOPs per token are twice the multiply-accumulates per token (`macs_per_token` of `build --format json`).",
        framed("- linear: {features: 8}") + "expect: {flops_per_token: 64}\n",
        framed("- linear: {features: 8}") + "expect: {flops_per_token: 128}\n",
    ),
    "E704": Code(
        "another output than expected",
        "The model's output does not have the axes that `expect:` states.",
        framed("- linear: {features: 4}") + "expect: {output: [batch, seq, 8]}\n",
        framed("- linear: {features: 4}") + "expect: {output: [batch, seq, 4]}\n",
    ),
    "E705": Code(
        "another lookahead than expected",
        "An output token depends on more, or fewer, later tokens of the input than `expect:` states: 0 in a causal "
        "model, `all` where it is the whole sequence. The hint names the step where the future enters. `upsample` "
        "repeats what its window ended with, so behind both the window is seen at its first token.",
        framed("- downsample: {factor: 4}\n- upsample: {factor: 4}") + "expect: {lookahead: 0}\n",
        framed("- downsample: {factor: 4}\n- upsample: {factor: 4}") + "expect: {lookahead: 3}\n",
    ),
    # the world around
    "E803": Code("a spec cannot be read", "There is no such file or bundled spec, or it may not be read."),
    "E804": Code(
        "a file that `use` may not read",
        "`use:` reads .yaml and .yml files below the folder of the spec, links followed, so that a spec from elsewhere "
        "cannot show what is in other files. `--allow-use DIR` (in Python `allow_use=`) adds a folder.",
        HEAD + "use: [/etc/passwd]\n" + MODEL,
        HEAD + MODEL,
    ),
}


def text(code: str) -> str:
    """All about a code, for a terminal."""
    known = CODES[code]
    out = [f"{code}: {known.title}", "", known.about]
    for label, example in (("For instance", known.example), ("Mended", known.fix)):
        if example and len(example) < 1000:
            out += ["", f"{label}:", *("  " + line for line in example.splitlines())]
    return "\n".join(out)
