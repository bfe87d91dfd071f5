"""Specs of legal size that are, or once were, slow to check: unknown names, deep nesting, long lists, YAML bombs.

Each case is a function of a scale. The tests use the largest scale, at most 1, whose text is within the limits.
"""

from __future__ import annotations

from collections.abc import Callable

from seqblocks.errors import Report, Source
from seqblocks.language import document

HEAD = "seqblocks: 1\n"
MODEL = "model: {input: {features: 8}, steps: [silu]}\n"
CASES: dict[str, Callable[[float], str]] = {}
LAYERS = "    - repeat:\n        times: 4096\n        steps:\n"
WIDE = "+".join(["1"] * 190)


def case(make: Callable[[float], str]) -> Callable[[float], str]:
    CASES[make.__name__] = make
    return make


def text_of(name: str) -> str:
    """Return the text of a case at the largest scale that the limits of a document allow."""
    for scale in (1, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1):
        text = CASES[name](scale)
        report = Report()
        document.parse(Source.of(name, text), report)
        if not any("too large" in each.message or "characters" in each.message for each in report.diagnostics):
            return text
    raise AssertionError(f"{name} is too large at every scale")


def each(text: str, count: float) -> str:
    """Repeat the text that many times, with `#` replaced by the number and `<` by the previous number."""
    return "".join(text.replace("#", str(i)).replace("<", str(i - 1)) for i in range(int(count)))


def spec(steps: str, head: str = "", input: str = "{features: 8}") -> str:
    return f"{HEAD}{head}model:\n  input: {input}\n  steps:\n{steps}"


def chain(first: str, block: str, count: int, last: str = "b{}", more: str = "", input: str = "{features: 8}") -> str:
    """Return blocks b0, b1, … that each use the previous one, and a model of the last."""
    blocks = "".join("  " + block.replace("#", str(i)).replace("<", str(i - 1)) + "\n" for i in range(1, count))
    return f"{HEAD}{more}blocks:\n  {first}\n{blocks}model: {{input: {input}, steps: [{last.format(count - 1)}]}}\n"


# --- unknown names among many known ones ---


@case
def unknown_top_keys(k: float) -> str:
    return HEAD + each("k#: 1\n", 40_000 * k) + MODEL


@case
def unknown_step_keys(k: float) -> str:
    return spec("    - linear:\n        features: 8\n" + each("        k#: 1\n", 40_000 * k))


@case
def unknown_input_keys(k: float) -> str:
    return f"{HEAD}model: {{input: {{{each('k#: 1, ', 40_000 * k)}}}, steps: [silu]}}\n"


@case
def unknown_recipe_keys(k: float) -> str:
    return f"{HEAD}{MODEL}checkpoint: {{silu: {{{each('k#: 1, ', 40_000 * k)}}}}}\n"


@case
def unknown_names(k: float) -> str:
    steps = each("    - linear: {features: y#, name: s#}\n", 16_000 * k)
    return spec(steps, "let:\n" + each("  x#: # + 1\n", 16_000 * k))


@case
def unknown_words(k: float) -> str:
    words = each("w#, ", 40_000 * k)
    return spec(f"    - scan: {{order: [{words}], steps: []}}\n", "let:\n" + each("  x#: 1\n", 20_000 * k))


@case
def unknown_wires(k: float) -> str:
    steps = each("    - layer_norm: {as: w#}\n", 10_000 * k)
    return spec(steps + each("    - gate: {from: w0, by: v#, name: g#}\n", 10_000 * k))


@case
def unknown_joined_wires(k: float) -> str:
    names = each("v#, ", 30_000 * k)
    return spec(each("    - silu: {as: w#}\n", 15_000 * k) + f"    - linear: {{features: 8, from: [{names}]}}\n")


@case
def unknown_block_arguments(k: float) -> str:
    blocks = "blocks:\n  b:\n    args:\n" + each("      a#: 1\n", 20_000 * k) + "    steps: [silu]\n"
    return spec("    - b:\n" + each("        z#: 1\n", 20_000 * k), blocks)


@case
def unknown_keys_of_a_pattern(k: float) -> str:
    names = " ".join(f"a{at}" for at in range(int(20_000 * k)))
    pattern = f"        pattern: 'b l ({names}) -> b l ({names})'\n"
    return spec(f"    - rearrange:\n{pattern}" + each("        a#: 1\n", 20_000 * k))


@case
def misspelt_common_keys(k: float) -> str:
    return spec("    - silu:\n" + each("        from#: 1\n", 20_000 * k))


@case
def missing_block_arguments(k: float) -> str:
    return spec("    - b\n", "blocks:\n  b:\n    args:\n" + each("      a#: int\n", 40_000 * k) + "    steps: [silu]\n")


@case
def unknown_ties(k: float) -> str:
    steps = each("    - layer_norm: {name: n#}\n", 8000 * k)
    tie = "tie: {weight: m#.weight}"
    return spec(steps + each(f"    - linear: {{features: 8, bias: false, name: l#, {tie}}}\n", 8000 * k))


@case
def ties_to_many_parameters(k: float) -> str:
    count = int(6000 * k)
    branches = each("          - b#: [{linear: {features: 8, bias: false}}]\n", count)
    tie = f"tie: {{weight: parallel.b{count - 1}.linear.weight}}"
    tied = each(f"    - linear: {{features: 8, bias: false, name: l#, {tie}}}\n", count)
    return spec(f"    - parallel:\n        branches:\n{branches}{tied}")


@case
def unknown_verbs(k: float) -> str:
    return spec(each("    - v#\n", 30_000 * k), "blocks:\n" + each("  b#: {steps: [silu]}\n", 10_000 * k))


@case
def unknown_parameters_to_own(k: float) -> str:
    names = each("x#, ", 20_000 * k)
    steps = each("          - layer_norm: {name: n#}\n", 10_000 * k)
    return spec(f"    - scan:\n        order: [forward, reverse]\n        own: [{names}]\n        steps:\n{steps}")


@case
def unknown_parameters_to_init(k: float) -> str:
    return spec("    - linear:\n        features: 8\n        init:\n" + each("          w#: zeros\n", 40_000 * k))


@case
def unknown_pattern_words(k: float) -> str:
    words = each("w# ", 4000 * k)
    return spec(f"    - repeat:\n        pattern: '{words}'\n" + each("        v#: [silu]\n", 12_000 * k))


@case
def unknown_uses(k: float) -> str:
    return f"{HEAD}use: [{each('v#, ', 40_000 * k)}{each('./v#.yaml, ', 40_000 * k)}]\n{MODEL}"


@case
def bad_names(k: float) -> str:
    return f"{HEAD}let: {{{each('1a#: 1, ', 40_000 * k)}}}\n{MODEL}"


@case
def keys_twice(k: float) -> str:
    return f"{HEAD}let: {{{each('a: #, ', 40_000 * k)}}}\n{MODEL}"


@case
def names_of_steps_twice(k: float) -> str:
    return spec(each("    - silu: {name: s_#}\n", 10_000 * k) + each("    - silu: {name: s}\n", 10_000 * k))


@case
def branches_twice(k: float) -> str:
    return spec(f"    - parallel: {{branches: [{each('{a: []}, ', 20_000 * k)}]}}\n")


@case
def torn_calls(k: float) -> str:
    return spec(f"    - linear: {{{each('k#: f(#, ', 20_000 * k)}}}\n")


# --- checkpoint maps ---


@case
def map_of_unknown_steps(k: float) -> str:
    return spec(each("    - layer_norm: {name: n#}\n", 12_000 * k)) + "checkpoint:\n" + each("  m#: x\n", 12_000 * k)


@case
def map_of_many_keys_in_layers(k: float) -> str:
    steps = f"{LAYERS}          - layer_norm\n          - linear: {{features: 8}}\n"
    return spec(steps) + "checkpoint:\n" + each("  'repeat.{l}.linear.w#': x\n", 12_000 * k)


@case
def map_of_many_steps_in_layers(k: float) -> str:
    steps = each("          - layer_norm: {name: n#}\n", 1000 * k)
    recipes = each("  'repeat.{l}.n#': {concat: ['x.{l}.#'], axis: 0}\n", 1000 * k)
    return spec(f"    - repeat:\n        times: 40\n        steps:\n{steps}") + f"checkpoint:\n{recipes}"


@case
def map_of_layers_that_are_absent(k: float) -> str:
    repeat = "{repeat: {times: n, steps: [layer_norm]}}"
    blocks = f"blocks:\n  b:\n    args: {{n: 1}}\n    steps: [{repeat}]\n    checkpoint:\n"
    return spec("    - b: {n: 3000}\n", blocks + each("      repeat.1#.layer_norm: x#\n", 20_000 * k))


@case
def map_of_owned_parameters(k: float) -> str:
    steps = each("          - layer_norm: {name: n#}\n", 10_000 * k)
    text = spec(f"    - scan:\n        order: [forward, reverse]\n        own: all\n        steps:\n{steps}")
    return text + "checkpoint:\n" + each("  scan.fwd.n#: x#\n", 10_000 * k)


@case
def map_of_many_patterns(k: float) -> str:
    steps = each("    - layer_norm: {name: n#}\n", 8000 * k)
    return spec(steps) + "checkpoint:\n" + each("  'n{i}x#': 'x{i}'\n", 8000 * k)


@case
def map_of_many_layouts(k: float) -> str:
    steps = each("    - layer_norm: {name: n#}\n", 8000 * k)
    names = each("  n#: a#\n", 8000 * k)
    return spec(steps) + f"checkpoint:\n{names}  layouts:\n" + each("    l#: {n0: b, n1: c}\n", 8000 * k)


@case
def map_of_layouts_of_many_names(k: float) -> str:
    steps = each("    - layer_norm: {name: n#}\n", 2000 * k)
    names = each("      n#: a#\n", 2000 * k)
    return spec(steps) + "checkpoint:\n  layouts:\n" + "".join(f"    l{at}:\n{names}" for at in range(16))


@case
def map_of_a_long_pattern(k: float) -> str:
    axes = each("a# ", 150_000 * k)
    recipe = f'{{rearrange: a, pattern: "{axes}-> x"}}'
    return spec("    - linear: {features: 8}\n") + f"checkpoint: {{linear.weight: {recipe}}}\n"


# --- nested and repeated steps ---

BOTH = "scan: {order: [forward, reverse], own: all, steps: [b<]}"
GRID = "scan: {order: [forward, reverse, rows, rows_reverse, columns, columns_reverse], own: all, steps: [b<]}"


@case
def scans_in_scans(_: float) -> str:
    return chain("b0: {steps: [layer_norm]}", f"b#: {{steps: [{{{BOTH}}}]}}", 16)


@case
def scans_in_scans_that_are_accepted(_: float) -> str:
    return chain("b0: {steps: [layer_norm]}", f"b#: {{steps: [{{{BOTH}}}]}}", 14)


@case
def scans_of_six_orders(_: float) -> str:
    return chain("b0: {steps: [layer_norm]}", f"b#: {{steps: [{{{GRID}}}]}}", 8, input="{features: 8, grid: [2, 2]}")


@case
def scans_that_share(_: float) -> str:
    share = BOTH.replace("own: all, ", "")
    return chain("b0: {steps: [layer_norm]}", f"b#: {{steps: [{{{share}}}]}}", 40)


TWICE = "{b<: {d: d, name: l}}, {b<: {d: d + 1, name: r}}"


@case
def blocks_that_double(_: float) -> str:
    return chain("b0: {args: {d: 8}, steps: [layer_norm]}", f"b#: {{args: {{d: 8}}, steps: [{TWICE}]}}", 30)


@case
def blocks_that_double_and_are_not_used(_: float) -> str:
    first = "b0: {args: {d: int}, steps: [{linear: {features: d}}]}"
    return chain(first, f"b#: {{args: {{d: int}}, steps: [{TWICE}]}}", 30, last="silu")


@case
def blocks_that_double_a_fault(_: float) -> str:
    first = "b0: {args: {d: 8}, steps: [{linear: {features: unknown}}]}"
    return chain(first, f"b#: {{args: {{d: 8}}, steps: [{TWICE}]}}", 30)


@case
def blocks_that_double_beside_a_fault(_: float) -> str:
    both = "{b<: {name: l}}, {b<: {name: r}}"
    return chain("b0: {steps: [layer_norm]}", f"b#: {{steps: [{both}]}}", 16, more="unknown: 1\n")


@case
def many_faults_in_many_blocks(k: float) -> str:
    faults = each("{linear: {features: x#, name: s#}}, ", 2000 * k)
    last = "{{repeat: {{times: 25, steps: [b{}]}}}}"
    first = f"b0: {{args: {{d: 1}}, steps: [{faults}]}}"
    return chain(first, "b#: {args: {d: 1}, steps: [{b<: {d: d}}]}", 50, last=last)


@case
def a_long_chain_of_blocks(k: float) -> str:
    return chain("b0: {steps: [silu]}", "b#: {steps: [b<]}", int(9000 * k))


@case
def repeats_in_repeats(_: float) -> str:
    return spec("    - repeat: {times: 4096, steps: [{repeat: {times: 4096, steps: [silu]}}]}\n")


@case
def repeats_of_nothing(_: float) -> str:
    return spec("    - repeat: {times: 4096, steps: [{repeat: {times: 4096, steps: []}}]}\n")


@case
def as_many_steps_as_there_may_be(_: float) -> str:
    return spec(LAYERS + each("          - linear: {features: 24, as: [q#, k#, v#], name: l#}\n"
                              "          - attention: {q: q#, k: k#, v: v#, heads: 2, name: a#}\n", 6))  # fmt: skip


@case
def long_patterns(k: float) -> str:
    words = each("w# ", 4000 * k)
    return spec(f"    - repeat:\n        pattern: '{words}'\n" + each("        w#: [silu]\n", 4000 * k))


# --- arguments evaluated for each layer ---


@case
def faulty_expressions_in_layers(k: float) -> str:
    return spec(LAYERS + each(f'          - linear: {{features: "# + {WIDE}+", name: s#}}\n', 3500 * k))


@case
def long_expressions_in_layers(k: float) -> str:
    wide = "+".join(["1"] * 60)
    return spec(LAYERS + each(f'          - linear: {{features: "8+0*(#+layer*({wide}))", name: s#}}\n', 3500 * k))


@case
def a_long_initialiser(k: float) -> str:
    total = "+".join(["1"] * int(3000 * k))
    return spec(f'    - linear: {{features: 8, init: {{weight: "normal(0, {total})"}}}}\n')


@case
def a_limit_of_spaces(k: float) -> str:
    return f'{HEAD}{MODEL}expect: {{params: "1{" " * int(1_900_000 * k)}1"}}\n'


@case
def an_initialiser_of_conditions(k: float) -> str:
    return spec(f'    - linear: {{features: 8, init: {{weight: "{"a if " * int(380_000 * k)}"}}}}\n')


@case
def a_pattern_of_many_words(k: float) -> str:
    return spec(f'    - repeat: {{pattern: "{"m " * int(950_000 * k)}", m: [silu]}}\n')


@case
def unknown_names_in_layers(k: float) -> str:
    return spec(LAYERS + each("          - linear: {features: dmi, name: s#}\n", 12))


@case
def many_arguments_in_layers(k: float) -> str:
    blocks = "blocks:\n  b:\n    args:\n" + each("      a#: 1\n", 8000 * k) + "    steps: [silu]\n"
    return spec(f"{LAYERS}          - b:\n" + each("              a#: layer\n", 8000 * k), blocks)


@case
def many_defaults_in_layers(k: float) -> str:
    blocks = "blocks:\n  b:\n    args:\n      x: 1\n" + each("      a#: 1\n", 20_000 * k) + "    steps: [silu]\n"
    return spec(f"{LAYERS}          - b: {{x: layer}}\n", blocks)


@case
def a_long_let_in_layers(k: float) -> str:
    entries = each("      a#: x + #\n", 20_000 * k)
    blocks = f"blocks:\n  b:\n    args: {{x: 1}}\n    let:\n{entries}    steps: [silu]\n"
    return spec(f"{LAYERS}          - b: {{x: layer}}\n", blocks)


@case
def a_long_list_in_layers(k: float) -> str:
    head = f"let: {{a: [{each('#, ', 50_000 * k)}]}}\nblocks: {{b: {{args: {{x: [], y: 1}}, steps: [silu]}}}}\n"
    return spec(f"{LAYERS}          - b: {{x: a, y: layer}}\n", head)


@case
def a_long_word_in_layers(k: float) -> str:
    head = f"let: {{a: '{'x' * int(1_900_000 * k)}'}}\nblocks: {{b: {{args: {{x: w, y: 1}}, steps: [silu]}}}}\n"
    return spec(f"{LAYERS}          - b: {{x: a, y: layer}}\n", head)


@case
def many_wires_in_layers(k: float) -> str:
    names = each("w, ", 30_000 * k)
    return spec(f"    - silu: {{as: w}}\n{LAYERS}          - linear: {{features: 8, from: [{names}]}}\n")


@case
def many_parts_in_layers(k: float) -> str:
    count = int(20_000 * k)
    split = f"          - linear: {{features: {count}, as: [{each('a#, ', count)}]}}\n"
    return spec(f"{LAYERS}{split}          - linear: {{features: 8, from: [{each('a#, ', count)}], name: b}}\n")


# --- long lists and long chains ---


@case
def a_chain_of_names(k: float) -> str:
    count = int(30_000 * k)
    entries = "".join(f"  a{i}: a{i - 1} + 0\n" for i in range(count - 1, 0, -1))
    return spec(f"    - linear: {{features: a{count - 1}}}\n", f"let:\n{entries}  a0: 1\n")


@case
def a_name_that_needs_all_others(k: float) -> str:
    count = int(20_000 * k)
    return f"{HEAD}let:\n  all: [{each('a#, ', count)}]\n" + each("  a#: # + 1\n", count) + MODEL


@case
def lists_of_lists(_: float) -> str:
    lists = "".join(f"  a{i}: [{', '.join([f'a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    return spec("    - b: {x: a11}\n", f"let:\n  a0: [1]\n{lists}blocks: {{b: {{args: {{x: []}}, steps: [silu]}}}}\n")


@case
def a_deep_list(k: float) -> str:
    head = "let:\n  a0: [1]\n" + "".join(f"  a{i}: [a{i - 1}]\n" for i in range(1, int(20_000 * k)))
    blocks = "blocks: {b: {args: {x: []}, steps: [silu]}}\n"
    return spec(f"    - b: {{x: a{int(20_000 * k) - 1}}}\n", head + blocks)


@case
def many_captures(k: float) -> str:
    count = 16_000 * k
    join = f"{{linear: {{features: 8, from: [{each('w#, ', count)}]}}}}"
    inner = f"    - residual: {{steps: [{{residual: {{steps: [{join}]}}}}]}}\n"
    return spec(each("    - silu: {as: w#}\n", count) + inner)


@case
def many_parts(k: float) -> str:
    count = int(40_000 * k)
    return spec(f"    - linear: {{features: {count}, as: [{each('a#, ', count)}]}}\n    - silu: {{from: a0}}\n")


@case
def many_bodies_that_see_many_wires(k: float) -> str:
    bodies = each("    - residual: {steps: [silu], name: r#}\n", 8000 * k)
    return spec(each("    - silu: {as: w#}\n", 8000 * k) + bodies)


@case
def many_parameters_to_own(k: float) -> str:
    steps = each("          - layer_norm: {name: n#}\n", 10_000 * k)
    names = each("n#, ", 10_000 * k)
    return spec(f"    - scan:\n        order: [forward, reverse]\n        own: [{names}]\n        steps:\n{steps}")


@case
def many_uses(k: float) -> str:
    return f"{HEAD}use: [{'vil, ' * int(50_000 * k)}]\n{MODEL}"


@case
def many_blocks(k: float) -> str:
    return HEAD + "blocks:\n" + each("  b#: {steps: [silu]}\n", 14_000 * k) + MODEL


@case
def many_aliases(k: float) -> str:
    first = "    - residual: &r\n        steps: &s\n          - silu: {name: a}\n"
    return spec(first + each("    - residual: {steps: *s, name: r#}\n", 8000 * k))


@case
def towers_of_powers(k: float) -> str:
    return f"{HEAD}let:\n" + each(f"  a#: {'**'.join(['9'] * 40)} + #\n", 5000 * k) + MODEL


@case
def broken_at_the_end(k: float) -> str:
    return HEAD + "let:\n" + each("  a#: 1\n", 40_000 * k) + "  x\n" + MODEL


# --- arguments that are steps ---

RUNS = "b0: {args: {m: steps, n: steps}, steps: [m, n]}"


@case
def steps_that_double(k: float) -> str:
    twice = "b#: {args: {m: steps}, steps: [{b<: {m: [m, m: {name: o}]}}, {b<: {name: p, m: [m]}}]}"
    return chain("b0: {args: {m: steps}, steps: [m]}", twice, int(60 * k), last="b{}: [silu]")


@case
def steps_that_change_places(k: float) -> str:
    block = "b#: {args: {m: steps, n: steps}, steps: [{b<: {m: [n, m], n: [m, n]}}]}"
    return chain(RUNS, block, int(60 * k), last="b{}: {{m: [silu], n: [tanh]}}")


@case
def steps_in_steps(k: float) -> str:
    text = "silu"
    for _ in range(int(20 * k)):
        text = f"{{b0: {{m: [{text}], n: [tanh]}}}}"
    return f"{HEAD}blocks: {{{RUNS}}}\nmodel: {{input: {{features: 8}}, steps: [{text}]}}\n"


@case
def steps_in_layers_with_many_names(k: float) -> str:
    names = each("  x#: 1\n", 6000 * k)
    words = each("        - linear: {features: 8 + 0 * x#, name: n#}\n", 6000 * k)
    head = f"let:\n{names}blocks:\n  run: {{args: {{m: steps}}, steps: [residual: [{{m: {{when: false}}}}]]}}\n"
    repeat = "    - repeat:\n        times: 4096\n        steps:\n"
    return spec(repeat + "          - run:\n              m:\n" + words.replace("        -", "                -"), head)


@case
def steps_with_many_values(k: float) -> str:
    values = f"let: {{x: [{each('1, ', 40_000 * k)}]}}\n"
    head = values + "blocks: {run: {args: {m: steps}, steps: [m]}}\n"
    step = "run: {m: [silu, {repeat: {pattern: m, m: [], name: x}}]}"
    return spec(f"    - repeat: {{times: 4096, steps: [{step}]}}\n", head)


@case
def blocks_with_many_arguments_that_are_steps(k: float) -> str:
    args, steps = each("a#: steps, ", 3000 * k), each("{a#: {name: n#}}, ", 3000 * k)
    given = each("a#: [silu], ", 3000 * k)
    head = f"blocks:\n  run: {{args: {{{args}}}, steps: [{steps}]}}\n  outer: {{steps: [run: {{{given}}}]}}\n"
    return spec(f"    - run: {{{given}}}\n    - outer\n", head)


@case
def layers_that_share_many_names(k: float) -> str:
    words = each("{linear: {features: 8, name: l#}}, ", 10)
    return spec(f"    - repeat: {{times: 4096, share: [{each('l0, ', 5000 * k)}l1], steps: [{words}]}}\n")


@case
def shares_in_shares(k: float) -> str:
    text = "{linear: {features: 8}}"
    for _ in range(int(12 * k)):
        text = f"{{repeat: {{times: 2, share: all, steps: [{text}]}}}}"
    return spec(f"    - {text}\n")


@case
def a_chain_of_shares(k: float) -> str:
    shares = each("    - linear: {features: 8, name: n#, share: n<}\n", 8000 * k)
    return spec("    - linear: {features: 8, name: n-1}\n".replace("-1", "_0") + shares.replace("n-1", "n_0"))


@case
def shares_with_nothing(k: float) -> str:
    return spec(each("    - linear: {features: 8, name: n#, share: m#}\n", 8000 * k))


@case
def shares_with_parts_of_a_large_step(k: float) -> str:
    layers = each("          - linear: {features: 8, name: l#}\n", 4)
    return spec(LAYERS + layers + each("    - linear: {features: 8, name: n#, share: repeat.#.l1}\n", 4000 * k))


@case
def experts_in_experts(k: float) -> str:
    text = "silu"
    for _ in range(int(8 * k)):
        text = f"experts: {{count: 4096, steps: [{text}]}}"
    return spec(f"    - {text}\n")


@case
def many_experts(k: float) -> str:
    return spec(each("    - experts: {count: 4096, name: e#, steps: [silu]}\n", 10 * k))
