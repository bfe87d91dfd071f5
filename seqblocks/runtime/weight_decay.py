"""Which parameters weight decay reaches, also after other tools renamed them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from seqblocks import graph
from seqblocks.graph import Graph
from seqblocks.runtime.primitive import is_primitive

RENAMED = ("_orig", "_g", "_v")  # by pruning, and by the spectral and weight norms that are no parametrizations


def decay_rules(model: nn.Module, body: Graph) -> dict[int, bool]:
    """Return whether weight decay reaches each parameter that a graph declares, by the identity of the parameter.

    A parameter that is parametrised, pruned or normalised keeps the rule of its name in the spec, and so do those of
    its parametrizations. A step keeps its rules inside of a wrapper, and in a copy of it. A tied name has the rule of
    the name that it is tied to, also if the tie is broken.
    """
    named = {item.name: item for item in graph.parameters(body)}
    declared = {name: named.get(item.tied or name, item).parameter.decay for name, item in named.items()}
    rules: dict[int, bool] = {}
    for path, module in model.named_modules():
        path = module._path if is_primitive(module) else path
        for names, parameter in _with_names(module):
            known = (graph.join(path, name) for name in names)
            decays = next((declared[name] for name in known if name in declared), None)
            if decays is not None:
                rules[id(parameter)] = decays
    return rules


def _with_names(module: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield the parameters of a module, each with the names that it may have had before it was renamed."""
    for name, parameter in module.named_parameters(recurse=False):
        yield [name, *(name.removesuffix(end) for end in RENAMED if name.endswith(end))], parameter
    if parametrize.is_parametrized(module):
        for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
            for parameter in steps.parameters():
                yield [name], parameter
