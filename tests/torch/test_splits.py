"""The declared splits of ops, computed in one process: the parts of all ranks add up to the result of the op."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

import seqblocks
from seqblocks import graph
from seqblocks.errors import Fault
from seqblocks.op import PRIMITIVES, Op, load_builtin
from seqblocks.ops.activations import Activation
from seqblocks.roles import Split, splits
from seqblocks.runtime.call import Call, Grid
from seqblocks.types import Wire

RANKS = 2
MODELS: dict[str, dict[str, Any]] = {
    "hybrid_small": {"dim": 16}, "slstm_forecaster": {}, "rwkv7_0_4b": {"dim": 128, "depth": 2},
    "vil2_tiny": {"dim": 16, "depth": 1}, "mamba3_130m": {"dim": 64, "depth": 1}, "minlstm_small": {"dim": 16},
    "recurrentgemma_2b": {"dim": 40, "layers": "r a"}, "xlstm_deltanet_small": {"dim": 16},
    "gla_1_3b": {"dim": 16, "depth": 1}, "memoroid_agent": {}, "captioner": {},
    "qwen3_next_small": {"dim": 32},
}  # fmt: skip
# Verbs that declare a split and do not occur in any of these.
OTHERS = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - linear: {features: 1, as: narrow}
    - calc: {u: narrow * input, v: "s * u - tanh(input)", learned: {s: 0.5}}
    - leaky_relu
    - elu
    - soft_cap: 3
    - time_step
    - divide: {by: input}
    - layer_scale
    - shift: 2
    - token_shift
    - rotary: {heads: 2}
    - repeat_heads: {heads: 2, times: 3}
    - select: 8
    - gated_recurrence: {decay: input}
    - lerp: {to: input}
    - scale: 2
    - phase
    - join_heads: {with: input, heads: 2, as: joined}
    - merge_attention: {with: joined, heads: 2}
    - merge_attention: {from: joined, with: joined, heads: 2, logsumexp: true, name: merge_again}
    - linear: {features: 12, as: queries, name: queries}
    - linear: {from: queries, features: 5, as: low, name: low}
    - linear: {from: queries, features: 2, as: common, name: common}
    - latent_attention: {q: queries, c: low, r: common, heads: 2, value: 3, as: latent}
    - selected_attention: {q: queries, k: queries, v: queries, index_q: queries, index_k: queries, heads: 2, top: 2}
    - outer_product: {from: latent, with: queries, heads: 2, as: matrices}
    - matrix_product: {from: queries, matrix: matrices, heads: 2}
"""


def nodes() -> dict[str, graph.Node]:
    """Return a node for each verb and set of arguments that declares a split."""
    found: dict[str, graph.Node] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", seqblocks.SpecWarning)
        specs = [seqblocks.load_model(name, values) for name, values in MODELS.items()]
        specs.append(seqblocks.load_text(OTHERS)[1])
    for spec in specs:
        for node in graph.walk(spec.graph):
            if declared(node):
                found.setdefault(f"{node.verb} {node.op.model_dump(exclude_defaults=True)}", node)
    return found


def declared(node: graph.Node) -> list[Split]:
    if node.op is None or not all(wire is None or wire.kind != "tokens" for wire in node.wires):
        return []
    try:
        found = list(splits(node.op, RANKS, node.wires))
    except Fault:
        return []
    return [split for split in found if not any(width % RANKS for width in widths(node, split))]


def widths(node: graph.Node, split: Split) -> list[int]:
    """Return the widths that are divided among ranks, since the plan checks whether that is possible."""
    read = zip(node.op.ports, node.wires, strict=True)
    made = [] if split.sums else [node.type.features]
    return [*made, *(wire.features for port, wire in read if wire and port.name in split.parts)]


def random_input(name: str, wire: Wire | None, generator: torch.Generator) -> torch.Tensor | None:
    if wire is None:
        return None
    tokens = math.prod(wire.grid) if wire.grid else 6
    shape = {"image": (2, wire.features, *(wire.grid or ())), "vector": (2, wire.features)}
    x = torch.randn(shape.get(wire.kind, (2, tokens, wire.features)), generator=generator, dtype=torch.float64)
    return -x.abs() if name == "decay" else x


def run(op: Op, parameters: dict[str, torch.Tensor], inputs: list[Any], wires: tuple[Wire | None, ...]) -> torch.Tensor:
    grid = next((wire.grid for wire in wires if wire and wire.grid), None)
    y = op.forward(parameters, Call(False, grid=Grid(grid)), *inputs)
    return y[0] if isinstance(y, tuple) else y


def by_parts(node: graph.Node, split: Split, parameters: dict[str, torch.Tensor], inputs: list[Any]) -> torch.Tensor:
    """Return the combined result of all ranks."""
    outputs = []
    for rank in range(RANKS):
        own = dict(parameters)
        own |= {name: parameters[name].chunk(RANKS, axis)[rank] for name, axis in split.cuts.items() if name in own}
        own |= {name: parameters[name] / RANKS for name in split.added if name in own}
        read = [
            x.chunk(RANKS, wire.feature_axis)[rank] if wire and port.name in split.parts else x
            for port, wire, x in zip(node.op.ports, node.wires, inputs, strict=True)
        ]
        outputs.append(run(split.op, own, read, node.wires))
    return sum(outputs) if split.sums else torch.cat(outputs, node.type.feature_axis)


def test_the_parts_of_all_ranks_are_what_an_op_computes():
    found = nodes()
    for name, node in found.items():
        generator = torch.Generator().manual_seed(0)
        inputs = [random_input(p.name, w, generator) for p, w in zip(node.op.ports, node.wires, strict=True)]
        shapes = {name: p.shape for name, p in node.parameters.items()}
        parameters = {n: torch.randn(s, generator=generator, dtype=torch.float64) / 2 for n, s in shapes.items()}
        expected = run(node.op, parameters, inputs, node.wires)
        for split in declared(node):
            y = by_parts(node, split, parameters, inputs)
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")  # noqa: B023
    load_builtin()
    builtin = {verb: op for verb, op in PRIMITIVES.items() if op.builtin}
    declares = {verb for verb, op in builtin.items() if op.independent or hasattr(op, "splits")}
    alike = {verb for verb, op in builtin.items() if issubclass(op, Activation)}
    assert declares - {node.verb for node in found.values()} - alike == {"layer_norm"}  # of one group
