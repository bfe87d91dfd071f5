"""Warnings about untrained parameters match the backward pass: exactly the parameters in warnings get no gradient."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.errors import SpecError
from seqblocks.graph import ModelSpec
from seqblocks.language.spec_files import bundled
from seqblocks.testing import random_context, random_input
from tests.compose import compose

SMALL = 3_000_000  # parameters of a bundled model that a test runs


def untrained_steps(model: ModelSpec) -> set[str]:
    """Return the parameters of the steps that W902 names: those of one step, or of all steps inside it."""
    spans = {each.span for each in model.warnings if each.code == "W902" and "receives no gradient" in each.message}
    idle = {id(node) for node in graph.walk(model.graph) if node.span in spans}
    inner = {id(each) for node in graph.walk(model.graph) if id(node) in idle for body in node.bodies.values()
             for each in graph.walk(body)}  # fmt: skip
    own = graph.parameters(model.graph)
    return {item.name for item in own if id(item.node) in idle | inner and item.tied is None}


def parameters_before(model: ModelSpec) -> set[str]:
    """Return the parameters of the inputs of W902's steps: W902 names only the last step of a chain."""
    spans = {each.span for each in model.warnings}
    nodes = sorted(graph.walk(model.graph), key=lambda node: node.outputs[0], reverse=True)
    before: set[int] = set()
    for node in nodes:
        if node.span in spans or not before.isdisjoint(node.outputs):
            before.update(node.reads)
    return {item.name for item in graph.parameters(model.graph) if not before.isdisjoint(item.node.outputs)}


def without_gradient(model: ModelSpec, seed: int = 0) -> set[str]:
    """Return the parameters whose gradient is zero everywhere, with random weights and a random input."""
    module = seqblocks.build_model(model, dtype=torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    length = model.input.length if isinstance(model.input.length, int) else 12 * module.frame_size
    y = module(random_input(module, 2, length, seed), **random_context(module, 2, seed))
    outputs = y.values() if isinstance(y, dict) else [y]
    sum((each * torch.randn(each.shape, generator=generator, dtype=torch.float64)).sum() for each in outputs).backward()
    return {name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()}


SPEC = """
seqblocks: 1
model:
  input: {features: 8, length: 4}
  steps:
    - linear: {features: 8, as: start}
    - repeat: {times: 1, name: r, steps: [{linear: {from: start, features: 8, as: a}}, STEPS]}
"""


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ("{scale: 0}, {add: {with: start}}", {"a"}),
        ("{scale: 1}, {add: {with: start}}", set()),
        ("silu, {shift: 4}, {add: {with: start}}", {"a"}),
        ("silu, {shift: 3}, {add: {with: start}}", set()),
        ("{softplus: {as: p}}, {scale: -1}, relu, {gate: {by: p, activation: none}}, {add: {with: start}}", {"a"}),
        ("{residual: [layer_norm, {scale: 0}]}", {"residual.layer_norm"}),
        ("{residual: [layer_norm, {linear: 8}, {scale: 0}]}", {"residual.linear"}),
        ("{parallel: [{x: [layer_norm, {scale: 0}]}, {y: [silu]}]}", {"parallel.x.layer_norm"}),
        ("{constant: {features: 8, learned: false, as: c}}, {multiply: {from: a, by: c}}, {add: {with: start}}", {"a"}),
        ("{constant: {features: 8, as: c}}, {multiply: {from: a, by: c}}, {add: {with: start}}", set()),
        ("{scan: {order: [forward, reverse], own: all, steps: [causal_conv, {scale: 0}]}}, {add: {with: a}}",
         {"scan.fwd.causal_conv", "scan.rev.causal_conv"}),
        ("{linear: {from: input, features: 8, tie: a, as: b}}, {scale: 0}, {add: {with: a}}", set()),
        ("{linear: {share: a, features: 8, as: b}}, {scale: 0}, {add: {with: start}}", {"a"}),
        ("{scale: 0}, {linear: {from: start, share: a, features: 8, as: b}}", set()),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")
def test_a_planted_constant(steps: str, warned: set[str]) -> None:
    _, model = check.load_text(SPEC.replace("STEPS", steps))
    assert model is not None
    untrained = untrained_steps(model)
    assert {name.rpartition(".")[0].removeprefix("r.0.") for name in untrained} == warned
    found = without_gradient(model)
    assert untrained <= found <= untrained | parameters_before(model)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")
def test_composed_specs(seed: int) -> None:
    """Composed specs get constants in random places: any step may be followed by `scale: 0`."""
    text = planted(compose(seed), seed)
    try:
        _, model = check.load_text(text)
    except SpecError:
        return
    if model is None or model.input.kind == "image":
        return
    try:
        found = without_gradient(model, seed)
    except seqblocks.RunError:  # longer than its positions
        return
    assert untrained_steps(model) <= found


def planted(text: str, seed: int) -> str:
    """Insert a step that outputs 0 into a list of steps of a composed spec, and return the spec as JSON."""
    data = json.loads(text)
    rng = random.Random(seed)
    lists: list[list[Any]] = []

    def visit(node: Any, key: str = "") -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                visit(value, name)
        elif isinstance(node, list):
            if key == "steps":
                lists.append(node)
            for value in node:
                visit(value)

    visit(data["model"])
    steps = rng.choice(lists)
    steps.insert(rng.randint(1, len(steps)) if steps else 0, {"scale": {"by": 0, "name": "planted"}})
    return json.dumps(data)


@pytest.mark.slow
def test_every_parameter_of_a_bundled_model_gets_a_gradient() -> None:
    """Of every second small model. Of large models, and those of images, the blocks are tested instead."""
    models = {name: seqblocks.load_model(name) for name, path in bundled().items() if path.parent.name == "models"}
    assert not [name for name, model in models.items() if model.warnings]
    small = [
        name for name, model in models.items() if graph.count(model.graph) <= SMALL and model.input.kind != "image"
    ]
    assert len(small) > 10
    for name in small[::2]:
        assert without_gradient(models[name]) == set(), name


@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")
def test_parameters_are_trained_where_they_are_shared() -> None:
    """Their owner may be blocked by a constant, and the layers that share them not."""
    text = """
seqblocks: 1
model:
  input: {features: 4, length: 3}
  steps:
    - linear: {features: 4, as: start}
    - repeat: {times: 1, name: owner, steps: [{layer_scale: {name: gain}}, SCALE, {add: {with: start}}]}
    - repeat: {times: 1, share: owner, steps: [{layer_scale: {name: gain}}, OTHER, {add: {with: start}}]}
"""
    constant, other = "{scale: 0}", "{scale: 2}"
    for own, sharing, warned in ((constant, other, False), (constant, constant, True), (other, constant, True)):
        _, model = check.load_text(text.replace("SCALE", own).replace("OTHER", sharing))
        assert model is not None
        assert ("owner.0.gain.weight" in without_gradient(model)) == warned
        found = [each.message for each in model.warnings if "gain" in each.message]
        assert bool(found) == warned, (own, sharing, found)
