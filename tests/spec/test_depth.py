"""`depth`, the number of layers around a step: in expressions, in defaults of blocks, and in initial values."""

from __future__ import annotations

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.errors import SpecError

LAYER = "linear: {features: 4, init: {weight: constant(depth)}}"
BLOCKS = f"""
blocks:
  direct: {{steps: [{{{LAYER}}}]}}
  default:
    args: {{n: depth}}
    steps: [{{linear: {{features: 4, init: {{weight: constant(n)}}}}}}]
  outer: {{steps: [direct]}}
  stack:
    args: {{layer: steps, times: 2}}
    let: {{around: depth}}
    steps:
      - repeat: {{times: times, steps: [layer]}}
      - linear: {{features: 4, init: {{weight: constant(around)}}}}
"""


def spec(steps: str, blocks: str = BLOCKS, let: str = "") -> str:
    return f"seqblocks: 1\n{let}{blocks}\nmodel: {{input: {{features: 4}}, steps: [{steps}]}}\n"


def initial(text: str, **overrides: object) -> dict[str, float]:
    """Return the constants that weights start with, by the names of their steps."""
    _, model = check.load_text(text, set=overrides)
    assert model
    found = graph.parameters(model.graph)
    return {item.name[:-7]: item.parameter.init.values[0] for item in found if item.parameter.init.name == "constant"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (f"{{{LAYER}}}", [1]),
        ("default, direct", [1, 1]),
        ("{repeat: {times: 3, steps: [direct]}}", [3] * 3),
        ("{repeat: {times: 3, index: i, steps: [default]}}", [3] * 3),
        ("{repeat: {times: 3, steps: [{default: {n: 5}}]}}", [5] * 3),
        ("{repeat: {times: 3, steps: [{default: {n: 2 * depth}}]}}", [6] * 3),
        ("{repeat: {pattern: a*2 b, times: 2, a: [direct], b: [default]}}", [6] * 6),
        ("{repeat: {times: 2, steps: [direct, {repeat: {times: 3, steps: [outer]}}]}}", [2, 6, 6, 6] * 2),
        ("{repeat: {times: 2, steps: [direct]}}, {repeat: {times: 3, name: b, steps: [direct]}}", [2, 2, 3, 3, 3]),
        ("{repeat: {times: 2, steps: [outer]}}, outer", [2, 2, 1]),
        ("{repeat: {times: 0, steps: [direct]}}, default", [1]),
        ("{repeat: {times: 2, steps: [{residual: [{scan: {order: reverse, steps: [outer]}}]}]}}", [2, 2]),
        # Steps passed to a block run inside its layers and those around the block; a `let:` counts the latter only.
        ("{stack: {layer: [direct]}}", [2, 2, 1]),
        ("{repeat: {times: 3, steps: [{stack: {layer: [default]}}]}}", [6, 6, 3] * 3),
        (f"{{repeat: {{times: 3, steps: [{{stack: {{layer: [{{{LAYER}}}]}}}}]}}}}", [6, 6, 3] * 3),
        ("{stack: {layer: [outer]}}, {stack: {layer: [outer], times: 3, name: b}}", [2, 2, 1, 3, 3, 3, 1]),
    ],
)
def test_depth_is_the_product_of_the_layers_around_a_step(steps: str, expected: list[int]) -> None:
    assert list(initial(spec(steps)).values()) == expected


def test_a_block_is_lowered_once_for_each_depth_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not read `depth` are shared between repeats of any length."""
    blocks = "blocks: {plain: {steps: [{linear: 4}]}, direct: {steps: [{linear: 4, }]}}"
    steps = "{repeat: {times: 2, steps: [plain]}}, {repeat: {times: 3, name: b, steps: [plain]}}"
    _, model = check.load_text(spec(steps, blocks))
    assert model
    assert len({id(node.bodies[""]) for node in graph.walk(model.graph) if node.verb == "plain"}) == 1
    _, model = check.load_text(spec(steps.replace("plain", "outer")))
    assert model
    assert len({id(node.bodies[""]) for node in graph.walk(model.graph) if node.verb == "outer"}) == 2


def test_names_of_your_own_win() -> None:
    steps = "{repeat: {times: 3, steps: [direct, default]}}"
    assert list(initial(spec(steps, let="let: {depth: 7}\n")).values()) == [7, 3] * 3  # a default sees no `let:`
    blocks = "blocks: {own: {args: {depth: 5}, steps: [{" + LAYER + "}]}}"
    assert list(initial(spec("{repeat: {times: 3, steps: [own]}}", blocks)).values()) == [5] * 3
    named = f"{{repeat: {{times: 3, index: depth, steps: [{{{LAYER}}}]}}}}"
    assert list(initial(spec(named)).values()) == [0, 1, 2]


def test_overrides() -> None:
    text = spec("{repeat: {times: 3, steps: [default]}}")
    assert list(initial(text, **{"model.repeat.times": 2}).values()) == [2, 2]
    assert list(initial(text, **{"blocks.default.n": 9}).values()) == [9] * 3
    assert list(initial(text, **{"blocks.default.n": "depth + 1"}).values()) == [4] * 3
    assert list(initial(text, **{"model.repeat.default.n": "depth * 10"}).values()) == [30] * 3


def test_a_condition_may_read_it() -> None:
    blocks = "blocks: {b: {steps: [{linear: {features: 4, when: depth > 2, init: {weight: zeros}}}]}}"
    steps = "{repeat: {times: 2, steps: [b]}}, {repeat: {times: 3, name: b, steps: [b]}}"
    _, model = check.load_text(spec(steps, blocks))
    assert model
    assert [node.verb for node in graph.walk(model.graph) if node.op] == ["linear"] * 3


def test_a_block_that_no_step_uses() -> None:
    """Its depth is not known, so nothing that depends on it is a fault."""
    blocks = "blocks: {b: {args: {n: depth}, steps: [{linear: {features: 4 / (depth - 1) + n}}, {proj_down: 4}]}}"
    check.load_text(spec("{linear: 4}", blocks))


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        # It does not stand in for an entry of `let:` that is missing.
        (spec("{repeat: {times: depth, steps: [direct]}}"), "E303", "define your own in `let:`"),
        (spec("direct", let="let: {a: 2 * depth}\n"), "E303", "define your own in `let:`"),
        (spec("{linear: dept}"), "E303", "did you mean 'depth'?"),
        (spec("{linear: {features: 4, init: {weight: constant(dpeth)}}}"), "E303", "did you mean 'depth'?"),
        (spec("b", "blocks: {b: {steps: [{proj_down: {features: 4, blocks: num_layers}}]}}"), "E303", "'depth'"),
    ],
)
def test_faults(text: str, code: str, hint: str) -> None:
    with pytest.raises(SpecError) as error:
        check.load_text(text)
    assert [each.code for each in error.value.diagnostics] == [code]
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("block", "step", "weaker"),
    [
        ("xlstm", "mlstm_block: {dim: 32}", "proj_down"),
        ("xlstm", "slstm_block: {dim: 32}", "proj_down"),
        ("xlstm", "xlstm_large_block: {dim: 32, heads: 4}", "proj_down"),
        ("mamba", "mamba_block: {dim: 32}", "out_proj"),
        ("mamba", "residual: [{vim_v1_mixer: {dim: 32}}]", "out_proj"),
        ("mamba", "residual: [{vim_v2_mixer: {dim: 32}}]", "out_proj"),
        ("mamba2", "mamba2_block: {dim: 32, head: 16, state: 16}", "out_proj"),
        ("mamba3", "residual: [{mamba3_mixer: {dim: 32, head: 16, state: 16}}]", "out_proj"),
        ("griffin", "griffin_layer: {dim: 32, hidden: 8, mixer: [{griffin_mixer: {dim: 32, heads: 4}}]}", "linear_out"),
        ("griffin", "residual: [{griffin_attention: {dim: 32, heads: 4}}]", "o_proj"),
        ("xlstm", "residual: [{proj_down: 32}]", "proj_down"),
    ],
)
def test_layers_start_with_a_smaller_output_the_more_there_are(block: str, step: str, weaker: str) -> None:
    def scales(times: int) -> set[float]:
        text = f"seqblocks: 1\nuse: [{block}]\nmodel: {{input: {{features: 32}}, steps: [{{repeat: {{times: {times}, "
        _, model = check.load_text(f"{text}steps: [{{{step}}}]}}}}]}}")
        assert model
        found = [item for item in graph.parameters(model.graph) if item.name.endswith(f"{weaker}.weight")]
        inits = [item.parameter.init for item in found]
        return {1 / init.values[1] if init.name == "wang" else init.values[1] for init in inits}

    (one,), (sixteen,) = scales(1), scales(16)
    assert sixteen in (pytest.approx(one / 16), pytest.approx(one / 4))  # by the blocks, or by the root of the layers
