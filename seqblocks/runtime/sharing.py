"""Modules of steps with `share:`, which use the parameters of another step.

Such modules have no parameters. They keep an unregistered reference to the module that owns them and read them in each
call, so that a replaced parameter of the owner is used by all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from seqblocks.graph import Graph, Named, parameters

NONE: Mapping[str, tuple[nn.Module, str]] = MappingProxyType({})


class Holder(nn.Module):
    """A module with parameters, some of which may be read from others.

    It has no public names but those of torch, since steps may be below it.
    """

    _owners: Mapping[str, tuple[nn.Module, str]] = NONE  # by parameter: the module that has it, and its name there


def shared_parameters(holder: Holder) -> dict[str, Any]:
    """Return the parameters of a module that other modules have."""
    return {name: getattr(owner, there) for name, (owner, there) in holder._owners.items()}


def tie(model: nn.Module, body: Graph) -> None:
    """Let the tied names of a graph have one parameter."""
    for item in parameters(body):
        if item.tied is not None:
            holder, _, leaf = item.name.rpartition(".")
            model.get_submodule(holder).register_parameter(leaf, model.get_parameter(item.tied))


def connect(model: nn.Module, shared: Iterable[Named]) -> None:
    """Let the modules of steps that share parameters read them from those that own them."""
    for item in shared:
        path, _, name = item.name.rpartition(".")
        owner, _, there = str(item.tied).rpartition(".")
        holder = model.get_submodule(path)
        assert isinstance(holder, Holder)
        holder._owners = {**holder._owners, name: (model.get_submodule(owner), there)}
