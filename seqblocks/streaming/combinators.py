"""Write the steps of blocks and combinators into the function of a plan. Other modules are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seqblocks.analysis.steps.combinators.cell import STARTED
from seqblocks.graph import SHARED, CellNode, ExpertsNode, Graph, Node, ParallelNode, RepeatNode, ResidualNode, ScanNode
from seqblocks.runtime.body import Block, Body
from seqblocks.runtime.cell import Cell
from seqblocks.runtime.experts import Experts, on_routed
from seqblocks.runtime.modules import is_hooked
from seqblocks.runtime.parallel import Parallel, merged
from seqblocks.runtime.repeat import Repeat
from seqblocks.runtime.residual import Residual
from seqblocks.runtime.scan import Scan
from seqblocks.runtime.torch_modules import is_built
from seqblocks.streaming.source import Path
from seqblocks.streaming.writer import COMBINATORS, Names, PlanWriter
from seqblocks.token_function import TokenFunction


def _block(writer: PlanWriter, module: nn.Module, node: Node, inputs: Sequence[str], path: Path) -> str | None:
    """Run a block, or a scan in token order; other scans are not supported."""
    is_backward = isinstance(node, ScanNode) and not node.is_forward
    return None if is_backward else writer.body(module, node.bodies[""], inputs, path)


def _cell(writer: PlanWriter, module: Cell, node: CellNode, inputs: Sequence[str], path: Path) -> str | None:
    """Run the steps of a cell on one token, with its states as variables."""
    if writer.frames.have_several_tokens:
        return None
    body, source = node.bodies[""], writer.source
    source.splits = False
    before = {name: source.given((*path, name)) for name in body.ports}
    if STARTED in node.state:
        started = source.assign(f"{source.given((*path, STARTED))} != 0")
        choose = source.constant(torch.where)
        for name, state in before.items():
            if (own := f"start_{name}") in node.parameters:
                before[name] = source.assign(f"{choose}({started}, {state}, {writer.parameter(module, own)})")
        source.keep((*path, STARTED), f"{source.constant(torch.ones_like)}({source.given((*path, STARTED))})")
    read = dict(zip(node.reads, inputs, strict=True))
    values = [inputs[0], *before.values(), *(read[value] for value in body.captures)]
    phase, writer.phase = writer.phase, None  # the steps of a cell are those of one token in any case
    try:
        return writer.body(module, body, values, path)
    finally:
        writer.phase = phase


def _experts(writer: PlanWriter, module: Experts, node: ExpertsNode, inputs: Sequence[str], path: Path) -> str | None:
    """Run the chosen experts, each by its own function."""
    router, labels = module._modules["router"], module.labels
    if not is_built(router) or is_hooked(router) or module.needs_each:
        return None
    if any(type(layer := module._modules[label]) is not Body or is_hooked(layer) for label in labels):
        return None
    router_node, *_ = node.bodies[""].nodes
    logits = writer.node(writer.child(module, "router"), router_node, inputs[:1], (*path, "router"))
    values = dict(zip(node.reads, inputs, strict=True))
    read = [inputs[0], *(values[value] for value in node.bodies[labels[0]].captures)]
    experts = [_expert(writer, module, label, node.bodies[label], len(read), path) for label in labels]
    call = writer.call

    def run(experts: tuple[Callable[..., Tensor], ...], logits: Tensor, *tokens: Tensor) -> Tensor:
        _, weights, chosen = module.route(logits, call)
        if len(chosen) != 1:
            return on_routed(experts, [*tokens], weights, chosen, each=False)
        y = torch.stack([experts[at](*tokens) for at in chosen[0].tolist()], 1)
        return (y * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    run_name = writer.source.constant(TokenFunction(run))
    y = writer.source.call(run_name, [f"({', '.join(experts)},)", logits, *read], path, [])
    if SHARED not in node.bodies:
        return y
    return writer.source.assign(f"{y} + {_layer(writer, module, SHARED, node.bodies[SHARED], inputs[0], values, path)}")


def _expert(writer: PlanWriter, module: Experts, label: str, body: Graph, count: int, path: Path) -> str:
    """Write the function of an expert with `count` inputs and return its name."""
    layer, inputs = writer.child(module, label), [writer.source.variable() for _ in range(count)]
    writer.guard.note_bypassed(layer)
    with writer.frames.as_rows():
        return writer.source.define(inputs, lambda: writer.body(layer, body, inputs, (*path, label)))


def _residual(writer: PlanWriter, module: Residual, node: ResidualNode, inputs: Sequence[str], path: Path) -> str:
    y = writer.body(module, node.bodies[""], inputs, path)
    return writer.source.assign(f"{inputs[0]} + {y}")


def _repeat(writer: PlanWriter, module: Repeat, node: RepeatNode, inputs: Sequence[str], path: Path) -> str:
    x, values = inputs[0], dict(zip(node.reads, inputs, strict=True))
    for label, body in node.bodies.items():
        x = _layer(writer, module, label, body, x, values, path)
        values |= {value: writer.exports[value] for value in body.exports}
    return x


def _parallel(writer: PlanWriter, module: Parallel, node: ParallelNode, inputs: Sequence[str], path: Path) -> str:
    values = dict(zip(node.reads, inputs, strict=True))
    made = [_layer(writer, module, *item, inputs[0], values, path) for item in node.bodies.items()]
    merge = writer.source.constant(TokenFunction(lambda *results: merged([*results], node.arguments.merge)))
    return writer.source.call(merge, made, path, [])


def _layer(writer: PlanWriter, module: nn.Module, label: str, body: Graph, x: str, values: Names, path: Path) -> str:
    layer, read = writer.child(module, label), [x, *(values[value] for value in body.captures)]
    if type(layer) is Body and not is_hooked(layer):
        writer.guard.note_bypassed(layer)
        return writer.body(layer, body, read, (*path, label))
    return writer.call_module(layer, None, body.reads, [body.result, *body.exports], read, (*path, label))


COMBINATORS.update({
    Block: _block, Scan: _block, Residual: _residual, Repeat: _repeat, Parallel: _parallel, Experts: _experts,
    Cell: _cell,
})
