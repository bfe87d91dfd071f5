"""`share:` in the analysis: owners, counts, tables, and used steps."""

from __future__ import annotations

import re
import warnings

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.cost import params_bytes
from seqblocks.descriptions import listing
from seqblocks.descriptions.summary import Row, summarise
from seqblocks.errors import SpecError, SpecWarning
from seqblocks.graph import ModelSpec
from tests.spec.invariants import verify

PAIR = """blocks:
  twice: {args: {mixer: steps}, steps: [{mixer: {name: first}}, {mixer: {name: second, share: first}}]}
  pair: {steps: [{linear: {features: 8, name: a}}, {linear: {features: 8, name: b, share: a}}]}
"""


def model(steps: str, blocks: str = "", input: str = "{features: 8}") -> ModelSpec:
    """Return the model of some steps. lin(a) is a linear map with a bias; lin(b of a) shares its parameters."""
    steps = re.sub(r"lin\((\w+) of ([\w.]+)\)", r"{linear: {features: 8, name: \1, share: \2}}", steps)
    steps = re.sub(r"lin\((\w+)\)", r"{linear: {features: 8, name: \1}}", steps)
    lines = "".join(f"    {line}\n" for line in steps.strip().splitlines())
    _, made = check.load_text(f"seqblocks: 1\n{blocks}model:\n  input: {input}\n  steps:\n{lines}")
    assert made
    verify(made)
    return made


def owners(made: ModelSpec) -> dict[str, str]:
    """Return the owner of each shared weight."""
    found = [item for item in graph.parameters(made.graph, shared=True) if item.name.endswith(".weight")]
    stored = {item.name for item in graph.parameters(made.graph)}
    assert {item.tied for item in found if item.shared} <= stored
    assert all(item.shared or item.name in stored for item in found)
    return {item.name[:-7]: str(item.tied)[:-7] for item in found if item.shared}


LINEAR = 8 * 8 + 8


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("- lin(a)\n- lin(b of a)", {"b": "a"}),
        (
            "- lin(a)\n- lin(b of a)\n- lin(c of b)",
            {"b": "a", "c": "a"},
        ),
        ("- pair: {name: p}\n- pair: {name: q, share: p}", {"p.b": "p.a", "q.a": "p.a", "q.b": "p.a"}),
        ("- pair\n- linear: {features: 8, share: pair.b}", {"pair.b": "pair.a", "linear": "pair.a"}),
        (
            "- residual: [lin(a), {residual: [lin(b of a)]}]",
            {"residual.residual.b": "residual.a"},
        ),
        (
            "- lin(a)\n- repeat: {times: 2, name: r, steps: [lin(x of a)]}",
            {"r.0.x": "a", "r.1.x": "a"},
        ),
        (
            "- repeat: {times: 2, name: r, steps: [{pair: {name: p}}]}",
            {"r.0.p.b": "r.0.p.a", "r.1.p.b": "r.1.p.a"},
        ),
        (
            "- repeat: {times: 3, name: r, share: all, steps: [{pair: {name: p}}]}",
            {"r.0.p.b": "r.0.p.a"} | {f"r.{i}.p.{x}": "r.0.p.a" for i in (1, 2) for x in "ab"},
        ),
        (
            "- repeat: {times: 2, name: r, share: [p.a], steps: [{pair: {name: p}}, lin(x)]}",
            {"r.0.p.b": "r.0.p.a", "r.1.p.a": "r.0.p.a", "r.1.p.b": "r.0.p.a"},
        ),
        (
            "- repeat: {name: r, pattern: m s m s, share: all, m: [lin(x)], s: [lin(x)]}",
            {"r.2.x": "r.0.x", "r.3.x": "r.1.x"},
        ),
        (
            "- repeat: {name: r, pattern: m s m s, share: [y], m: [lin(x)], s: [lin(y)]}",
            {"r.3.y": "r.1.y"},
        ),
        (
            "- repeat: {times: 2, steps: [lin(x)]}\n- repeat: {name: s, times: 2, share: repeat, steps: [lin(x)]}",
            {"s.0.x": "repeat.0.x", "s.1.x": "repeat.1.x"},
        ),
        (
            "- repeat: {times: 2, share: all, steps: [repeat: {times: 2, share: all, steps: [lin(x)]}]}",
            {f"repeat.{i}.repeat.{j}.x": "repeat.0.repeat.0.x" for i in (0, 1) for j in (0, 1) if i or j},
        ),
        (
            "- parallel: [{b: [lin(x)]}]\n- parallel: {name: q, share: parallel, branches: [{b: [lin(x)]}]}",
            {"q.b.x": "parallel.b.x"},
        ),
        ("- lin(a)\n- linear: {features: 8, name: b, when: 1 > 2, share: a}", {}),
        (
            "- repeat: {times: 2, steps: [lin(x)]}\n- residual: {share: repeat.1, steps: [lin(x)]}",
            {"residual.x": "repeat.1.x"},
        ),
        (
            "- twice: {mixer: [{residual: [lin(x)]}]}\n- lin(b of twice.first.residual.x)",
            {"twice.second.residual.x": "twice.first.residual.x", "b": "twice.first.residual.x"},
        ),
        (
            "- twice: {name: t, mixer: [lin(x), lin(y of x)]}",
            {"t.first.y": "t.first.x", "t.second.x": "t.first.x", "t.second.y": "t.first.x"},
        ),
        ("- lin(a)\n- repeat: {times: 0, share: a, steps: [silu]}", {}),
        ("- repeat: {times: 0, share: all, steps: [lin(x)]}", {}),
        ("- repeat: {times: 1, share: all, steps: [lin(x)]}", {}),
    ],
)
def test_owners(steps: str, expected: dict[str, str]) -> None:
    made = model(steps, PAIR)
    assert owners(made) == expected
    found = summarise(made)
    assert found.params == LINEAR * len([item for item in graph.parameters(made.graph) if item.name.endswith("weight")])
    assert found.params * 4 == params_bytes(made.graph, "float32") == found.params_bytes
    assert sum(held_parameters(row) for row in found.rows) == found.params
    for owner in expected.values():
        assert f" = {owner}.weight" in listing.text(made)


def held_parameters(row: Row) -> int:
    """Return the parameters of a row: those of its steps, in all layers that it describes."""
    inside = sum(held_parameters(each) for each in row.rows)
    assert row.params == (inside if row.rows else row.params), row.names
    return row.params * (len(row.names) if row.kind == "layer" else 1)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("none", {"s.b": "s.a", "s.o": "out"}),
        ("all", {f"s.{d}.{x}": y.format(d) for d in ("fwd", "rev") for x, y in (("b", "s.{}.a"), ("o", "out"))}),
        ("[a]", {"s.fwd.b": "s.fwd.a", "s.rev.b": "s.rev.a", "s.o": "out"}),
        ("[c]", {"s.b": "s.a", "s.o": "out"}),
    ],
)
def test_directions(own: str, expected: dict[str, str]) -> None:
    inside = ["a}", "b, share: a}", "c}", "o, share: out}"]
    steps = ", ".join(f"{{linear: {{features: 8, name: {each}}}" for each in inside)
    scan = f"- scan: {{order: [forward, reverse], own: {own}, name: s, steps: [{steps}]}}"
    made = model(f"- linear: {{features: 8, name: out}}\n{scan}\n{scan.replace('name: s', 'name: t, share: s')}")
    found = owners(made)
    assert {name: owner for name, owner in found.items() if name[0] == "s"} == expected
    assert {owner for name, owner in found.items() if name[0] == "t"} == {*expected.values(), *stored(made)} - {""}
    assert not [item for item in graph.parameters(made.graph) if item.name[0] == "t"]
    assert summarise(made).params == graph.count(made.graph) == LINEAR * (3 + {"none": 0, "all": 2}.get(own, 1))


def stored(made: ModelSpec) -> set[str]:
    return {item.name[:-7] for item in graph.parameters(made.graph) if item.name.endswith(".weight")}


def test_a_tie_to_shared_parameters_reaches_their_owner() -> None:
    made = model("- lin(a)\n- lin(b of a)\n- linear: {features: 8, tie: b}")
    tied = {item.name: item.tied for item in graph.parameters(made.graph)}
    assert tied["linear.weight"] == "a.weight"
    made = model("- lin(a)\n- linear: {features: 8, name: b, tie: a}\n- linear: {features: 8, share: b}")
    assert owners(made) == {"linear": "a"}


def test_costs_and_states_count_each_use() -> None:
    conv = "- causal_conv: {kernel: 4, name: a}"
    once, twice = model(conv), model(f"{conv}\n{conv.replace('name: a', 'name: b, share: a')}")
    assert summarise(twice).params == summarise(once).params
    assert summarise(twice).macs_per_token == 2 * (summarise(once).macs_per_token or 0)
    assert summarise(twice).state == 2 * summarise(once).state


def test_settings_that_may_differ() -> None:
    """Length, rate, activation, window and verb may differ."""
    steps = """
- causal_conv: {kernel: 4, name: a}
- downsample: {factor: 2}
- causal_conv: {kernel: 4, activation: silu, name: b, share: a}
- upsample: {factor: 2}
- linear: {features: 8, bias: false, name: c}
- proj_down: {features: 8, share: c}
"""
    assert owners(model(steps)) == {"b": "a", "proj_down": "c"}


def test_tables_name_the_owner_of_parameters() -> None:
    found = summarise(
        model(
            """
- pair: {name: p}
- pair: {name: q, share: p}
- repeat: {times: 3, share: [norm], steps: [{rms_norm: {name: norm}}, {linear: 8}]}
- repeat: {times: 3, name: all, share: all, steps: [{linear: 8}]}
""",
            PAIR,
        )
    )
    p, q, some, whole = found.rows
    assert (p.params, p.shares, q.params, q.shares, q.notes) == (LINEAR, "", 0, "p", ["parameters of p"])
    assert [(row.names, row.params, row.notes) for row in some.rows] == [
        (["0"], 8 + LINEAR, []),
        (["1", "2"], LINEAR, ["some parameters of 0"]),
    ]
    assert [row.notes for row in some.rows[1].rows] == [["shared"], []]
    assert [(row.names, row.params, row.shares) for row in whole.rows] == [(["0"], LINEAR, ""), (["1", "2"], 0, "0")]
    assert q.as_data()["shares"] == "p"


def test_an_unused_step_whose_parameters_are_shared() -> None:
    """It counts as used if the step that shares its parameters is used."""
    steps = "- identity: {as: x}\n- linear: {from: x, features: 8, name: a}\n- linear: {from: x, features: 8, share: a}"
    model(steps)
    with pytest.raises(SpecError, match="E315"):
        model(f"{steps}\n- silu: {{from: x}}")
    model("- identity: {as: x}\n- lin(a)\n- linear: {from: x, features: 8, name: b, share: a}\n"
          "- linear: {from: x, features: 8, share: b}")  # no output depends on a and b
    model("- identity: {as: x}\n- lin(a)\n- residual: {from: x, name: b, steps: [lin(l of a)]}\n"
          "- residual: {from: x, share: b, steps: [lin(l)]}")
    model("- identity: {as: x}\n- residual: {name: a, steps: [lin(l)]}\n"
          "- residual: {from: x, share: a, name: b, steps: [lin(l)]}\n- linear: {from: x, features: 8, share: b.l}")
    inner = "- residual: [lin(a), {linear: {from: input, features: 8}}]"
    with pytest.raises(SpecError, match="E315"):
        model(inner)
    model(f"{inner}\n- linear: {{features: 8, share: residual.a}}")


def test_an_unused_part_of_a_step_whose_parameters_are_shared() -> None:
    part = "- linear: {features: 8, name: a, as: [x, y]}\n- linear: {from: x, features: 8, name: b}"
    with pytest.warns(SpecWarning, match="nothing uses `y`"):
        model(part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(f"{part}\n- lin(c of a)")


def test_the_body_of_a_block_serves_all_its_uses() -> None:
    """Sharing inside a block is relative: each use of the block has the same body."""
    made = model("- repeat: {times: 3, name: r, steps: [{pair: {name: p}}]}", PAIR)
    bodies = {id(layer.nodes[0].bodies[""]) for layer in made.graph.nodes[0].bodies.values()}
    assert len(bodies) == 1


def test_overrides_change_shared_parameters() -> None:
    repeat = "repeat: {times: 3, steps: [{linear: 8}], share: none}"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{repeat}]}}"
    for share, count in (("none", 3), ("all", 1), ("[linear.bias]", 3)):
        _, made = check.load_text(text, set={"model.repeat.share": check.yaml(share)})
        assert made
        assert len([i for i in graph.parameters(made.graph) if i.name.endswith("weight")]) == count


@pytest.mark.slow
def test_sharing_with_a_large_step_many_times_is_bounded() -> None:
    """Each use counts towards the limit on size, so that the check of a hostile spec ends soon."""
    steps = "- repeat: {times: 1000, name: big, steps: [{linear: 8}, lin(b)]}\n"
    layers = "- repeat: {times: 1000, name: r, steps: [{repeat: {times: 1000, share: big, steps: [{linear: 8}, "
    with pytest.raises(SpecError, match="E104"):
        model(f"{steps}{layers}{{linear: {{features: 8, name: b}}}}]}}}}]}}")
