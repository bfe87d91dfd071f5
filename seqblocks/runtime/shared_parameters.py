"""Modules of steps with `share:`, which use the parameters of another step; and parameters tied by `tie:`.

Such modules have no parameters. They hold an unregistered reference to the module that owns the parameters and
read them in each call, so that replacing a parameter of the owner affects all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from seqblocks.errors import RunError
from seqblocks.graph import Graph, Named, parameters
from seqblocks.kernels.int8 import Int8Matrix

NONE: Mapping[str, tuple[nn.Module, str]] = MappingProxyType({})


class Holder(nn.Module):
    """A module with parameters, some of which may be read from others.

    It has no public names besides torch's, since step names may be its attributes.
    """

    _owners: Mapping[str, tuple[nn.Module, str]] = NONE  # by parameter: its owner, and its name there


def owners_of(module: nn.Module) -> Mapping[str, tuple[nn.Module, str]]:
    """Return the modules that own parameters which a module reads, with the names there, by the names here."""
    return getattr(module, "_owners", NONE)


def shared_parameters(holder: Holder) -> dict[str, Any]:
    """Return the parameters of a module that other modules own."""
    return {name: getattr(owner, original) for name, (owner, original) in holder._owners.items()}


def tie(model: nn.Module, body: Graph) -> None:
    """Make all tied names of a graph refer to one parameter.

    Raises RunError if one of them is no longer a parameter, as with parametrizations and pruning.
    """
    tie_names(model, (item for item in parameters(body) if item.tied is not None))


def tied_names(model: nn.Module, body: Graph) -> list[Named]:
    """Return the tied names of a graph that refer to one parameter at present."""
    own = dict(model.named_parameters(remove_duplicate=False))
    tied = (item for item in parameters(body) if item.tied is not None and item.name in own)
    return [item for item in tied if own[item.name] is own.get(str(item.tied))]


def tie_names(model: nn.Module, names: Iterable[Named]) -> None:
    """Do the same as `tie` for some of the names."""
    for item in names:
        (path, _, leaf), (owner, _, original) = item.name.rpartition("."), str(item.tied).rpartition(".")
        holder = model.get_submodule(path)
        try:
            shared = model.get_submodule(owner)._modules.get(original)
            if isinstance(shared, Int8Matrix) and leaf in holder._modules:
                holder.add_module(leaf, shared)
            else:
                holder.register_parameter(leaf, model.get_parameter(str(item.tied)))
        except (AttributeError, KeyError):
            what = f"{item.name} cannot be tied to {item.tied}: both must be plain parameters of the model"
            how = "merge or remove parametrizations, pruning masks and adapters, and restore its original steps"
            raise RunError(f"{what}. First {how}") from None


def share_entries(model: nn.Module, body: Graph, entries: dict[str, Any], prefix: str) -> None:
    """Make one parameter of the entries of a state_dict whose names are tied and refer to one in the model."""
    for item in tied_names(model, body):
        name, owner = prefix + item.name, prefix + str(item.tied)
        if name in entries and owner in entries:
            found = entries[owner]
            is_trained = model.get_parameter(item.name).requires_grad
            shared = found if isinstance(found, nn.Parameter) else nn.Parameter(found, is_trained)
            entries |= {name: shared, owner: shared}


def connect(model: nn.Module, shared: Iterable[Named]) -> None:
    """Connect modules that share parameters to the modules that own them."""
    for item in shared:
        path, _, name = item.name.rpartition(".")
        owner, _, original = str(item.tied).rpartition(".")
        holder = model.get_submodule(path)
        assert isinstance(holder, Holder)
        holder._owners = {**holder._owners, name: (model.get_submodule(owner), original)}
