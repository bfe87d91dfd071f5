"""The plan of tensor parallelism: split steps, whole steps, and rejected models. No process group is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.distributed import tensor, tensor_plan
from seqblocks.distributed.plan import Exchange
from seqblocks.op import PRIMITIVES, Op, load_builtin, primitive
from seqblocks.roles import Split
from seqblocks.runtime.call import Call
from seqblocks.runtime.residual_sums import Sum
from seqblocks.state import declared

TEXT = """
seqblocks: 1
use: [xlstm, transformer]
model:
  input: {{features: 16}}
  steps:
{steps}
    - linear: {{features: 4, name: last}}
"""


def plan_of(steps: str, ranks: int = 2) -> Any:
    indented = "\n".join(f"    {line}" for line in steps.strip().splitlines())
    return tensor_plan(seqblocks.load_text(TEXT.format(steps=indented))[1], ranks)


def test_each_step_is_listed_with_how_it_is_split():
    plan = plan_of("- mlstm_layer: {dim: 16, heads: 2}")
    steps = {path.removeprefix("mlstm_layer."): what for path, what in plan.steps}
    assert {name for name, what in steps.items() if what == "columns, outputs summed"} == {
        "cell.i", "cell.f", "proj_down"
    }  # fmt: skip
    assert {name for name, what in steps.items() if what == "heads"} == {"cell.mlstm", "cell.head_norm"}
    by_features = {name for name, what in steps.items() if what == "features"}
    assert by_features == {"c", "q", "k", "v", "learnable_skip", "gate"}
    assert steps["proj_up"] == "rows"
    assert "mlstm_layer.cell.mlstm      heads" in str(plan)


def test_rows_of_a_split_output_are_divided_by_its_parts():
    sharding = plan_of("- mlstm_layer: {dim: 16, heads: 2}").shardings["mlstm_layer.proj_up.weight"]
    assert sharding.axis == 0
    assert [list(sharding.ranges(rank, 2)) for rank in (0, 1)] == [[(0, 32), (64, 32)], [(32, 32), (96, 32)]]


def test_steps_that_would_only_be_gathered_stay_whole():
    assert "last.weight" not in plan_of("- swiglu: {hidden: 8}").shardings
    with pytest.raises(seqblocks.UsageError, match=r"no step of .* can be split over 2 ranks"):
        plan_of("- layer_norm")


def test_heads_that_cannot_be_divided_are_refused_by_name():
    with pytest.raises(seqblocks.UsageError) as error:
        plan_of("- linear: {features: 54, as: [q, k, v]}\n- attention: {q: q, k: k, v: v, heads: 3}")
    assert "over 2 ranks: attention (" in str(error.value)
    assert "heads 3 cannot be split evenly over 2 ranks" in str(error.value)



def test_a_step_that_mixes_features_gathers_them():
    plan = plan_of("- mlstm_layer: {dim: 16, heads: 2}\n- linear: {features: 32, name: a}\n- layer_norm")
    assert not [path for path, _ in plan.steps if path in ("a", "layer_norm", "last")]


@pytest.mark.parametrize("first", ["", "- linear: {features: 16, name: a}\n"])
def test_a_repeat_without_layers_is_passed_through(first):
    empty = "- repeat: {times: 0, steps: [{swiglu: {hidden: 8}}]}"
    plan = plan_of(f"{first}{empty}\n- swiglu: {{hidden: 8, name: b}}")
    assert [path for path, _ in plan.steps] == ["b"]


def test_parameters_of_a_shared_step_are_cut_alike():
    steps = """
- swiglu: {hidden: 8, name: first}
- rms_norm
- swiglu: {share: first, hidden: 8, name: second}
"""
    plan = plan_of(steps)
    assert sorted({name.partition(".")[0] for name in plan.shardings}) == ["first"]
    assert [path for path, _ in plan.steps] == ["first", "second"]


def test_wires_needed_whole_inside_a_block_are_whole_outside():
    text = TEXT.format(steps="""    - swiglu: {hidden: 8}
    - linear: {features: 16, as: a}
    - both: {as: b}
    - linear: {from: [b, a], features: 8}""")
    blocks = "blocks: {both: {steps: [{parallel: {merge: sum, branches: [{l: [silu]}, {r: [tanh]}]}}]}}\nmodel:"
    plan = tensor_plan(seqblocks.load_text(text.replace("model:", blocks))[1], 2)
    assert [path for path, _ in plan.steps] == ["swiglu"]


def test_a_rank_keeps_its_part_of_the_context():
    """A stream reads it at each token."""
    _, spec = seqblocks.load_text("""
seqblocks: 1
model:
  inputs: {x: {features: 8}, c: {vector: 6}, d: {features: 6, length: 5}}
  steps:
    - linear: {from: d, features: 8, as: known}
    - scan: {from: known, order: forward, steps: [{causal_conv: {kernel: 2}}], as: memory}
    - linear: {from: x, features: 8, as: q}
    - cross_attention: {q: q, k: memory, v: known, heads: 2}
    - linear: {features: 8, as: seen}
    - linear: {from: c, features: 8, as: w}
    - linear: {from: seen, features: 8}
    - add: {with: w}
    - linear: {features: 8, name: out}
""")
    plan = tensor_plan(spec, 2)
    assert plan.shardings["w.weight"].axis == 0
    assert declared(spec.graph)["w"]["output"].shape == (8,)
    part = declared(plan.part.graph)
    assert part["w"]["output"].shape == (4,)
    assert part["known"]["output"].shape == (5, 4)
    assert list(part["memory"]) == ["output"], "steps that read the context should have no state"


def test_a_gathered_input_of_a_norm_may_be_a_sum_that_is_not_added_yet(monkeypatch):
    """On a device a norm adds the residual before it, so the parts are added and gathered first."""
    norm = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 4}, steps: [layer_norm]}").layer_norm
    expected = norm(torch.ones(1, 2, 4).cumsum(2))
    norm.__class__ = tensor.Exchanging
    norm._exchange, norm._shards = Exchange((("gather",),), "", -1), SimpleNamespace(group=None)
    monkeypatch.setitem(tensor.ENTER, "gather", lambda x, group, axis: torch.cat([x, x + 2], axis))
    monkeypatch.setattr("seqblocks.kernels.dispatch.saves_launches", lambda x: True)
    part = torch.ones(1, 2, 2)
    y, _ = norm._forward_open([Sum(part, part.cumsum(2) - part)], Call(False), False)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_invalid_ranks(ranks):
    with pytest.raises(seqblocks.UsageError, match="ranks must be a whole number of at least 1, not"):
        plan_of("- swiglu: {hidden: 8}", ranks)


def test_a_declaration_that_does_not_fit_is_reported():
    @primitive("odd_halves")
    class OddHalves(Op):
        """A primitive whose part is as wide as the whole."""

        def splits(self, ranks, x):
            return [Split(self)]

        def forward(self, p, call, x):
            return x

    try:
        with pytest.raises(seqblocks.UsageError, match=r"odd_halves .*: odd_halves declares a split over 2 ranks"):
            plan_of("- odd_halves")
    finally:
        del PRIMITIVES["odd_halves"]


def test_arguments_that_count_what_is_independent_exist():
    load_builtin()
    for verb, op in PRIMITIVES.items():
        assert op.independent in ("", "features") or op.independent in op.model_fields, verb


def test_parameters_not_ordered_by_heads_stay_whole():
    """Corrections of a token precede heads, and a matrix shared by all heads cannot be divided among ranks."""
    plan = plan_of("""
- swiglu: {hidden: 8}
- headwise_linear: {block: 4, shared: true, as: q}
- linear: {features: 32, name: keys}
- l2_norm: {heads: 8, as: k}
- linear: {from: q, features: 32, as: v}
- linear: {from: q, features: 8, name: shares}
- sigmoid: {as: b}
- linear_attention: {q: q, k: k, v: v, beta: b, heads: 4, rule: delta, writes: 2}
""")
    split = {path for path, what in plan.steps if what in ("heads", "features")}
    assert not split & {"q", "headwise_linear", "linear_attention"}
    assert not {name for name in plan.shardings if name.startswith("q.")}
