"""Pass the sizes that a loop's outputs need to the loop, for AOTInductor.

Without this, torch 2.13 raises `KeyError: s77` for a `scan` over an open number of tokens. No issue for it was found;
the code that allocates the outputs came with https://github.com/pytorch/pytorch/pull/135603. A test in
tests/torch/test_export.py fails once torch no longer needs this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

Sources = dict[str, tuple[Node, int]]  # where an open size can be read: a tensor, and its axis


def pass_sizes(program: ExportedProgram) -> None:
    """Pass the open sizes of its outputs to each `scan` of a program.

    The compiler allocates the outputs before the loop, and needs their sizes among the arguments of the loop.
    """
    module = program.graph_module
    sources = _sources(program)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, init, inputs, others = node.args
        passed = {str(each.meta["val"]) for each in others if isinstance(each.meta.get("val"), torch.SymInt)}
        found = [_size(module, node, *sources[name]) for name in sorted(_open_sizes(node) - passed) if name in sources]
        node.args = (body, init, inputs, (*others, *found))
        _add_inputs(getattr(module, body.target), found)
    module.recompile()


def _sources(program: ExportedProgram) -> Sources:
    own = set(program.graph_signature.user_inputs)
    out: Sources = {}
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())) if node.name in own else ():
            out.setdefault(str(size), (node, axis))
    return out


def _open_sizes(node: Node) -> set[str]:
    """Return the symbols in the sizes of a loop's outputs per token."""
    carried: Any = node.args[1]
    sizes = (size for x in node.meta["val"][len(carried) :] for size in x.shape if isinstance(size, torch.SymInt))
    return {str(symbol) for size in sizes for symbol in size.node.expr.free_symbols}


def _size(module: GraphModule, before: Node, tensor: Node, axis: int) -> Node:
    with module.graph.inserting_before(before):
        node = module.graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
    node.meta["val"] = tensor.meta["val"].shape[axis]
    return node


def _add_inputs(body: GraphModule, sizes: list[Node]) -> None:
    """Add the sizes to the arguments of a loop's body, which ignores them."""
    *_, last = body.graph.find_nodes(op="placeholder")
    for number, size in enumerate(sizes):
        with body.graph.inserting_after(last):
            last = body.graph.placeholder(f"size_{number}")
        last.meta["val"] = size.meta["val"]
    body.recompile()
