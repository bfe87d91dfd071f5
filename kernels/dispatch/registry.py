"""The implementations of each op, registered by the files that define them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor

IMPLEMENTATIONS = ("triton", "torch", "reference")  # in the order of `auto`

Can = Callable[..., tuple[bool, str]]
Tiles = Callable[..., dict[str, dict[str, int]]]
Example = Callable[..., tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]]


def no_tiles(arch: str, **facts: Any) -> dict[str, dict[str, int]]:
    """Return the tiles of an implementation without kernels of its own: none."""
    return {}


class Implementation(NamedTuple):
    """One implementation of an op.

    run: the function, with the signature that all implementations of the op share.
    can(**facts): returns whether it can run, and the reason.
    tiles(arch, **facts): returns how its kernels are launched on an architecture ("sm_90"), by pass:
        {"forward": {"num_warps": 4, ...}, ...}.
    example(**facts): returns the call that is checked before its first use (self_check.py): the op's function, small
        tensors, options.
    by_hand: whether its derivative is written by hand, for autograd's reverse mode only.
    """

    run: Callable[..., Any]
    can: Can
    tiles: Tiles = no_tiles
    example: Example | None = None
    by_hand: bool = False


OPS: dict[str, dict[str, Implementation]] = {}


def register(
    op: str, name: str, run: Callable[..., Any], can: Can, tiles: Tiles = no_tiles, example: Example | None = None,
    by_hand: bool = False,
) -> None:
    """Add or replace an implementation of an op. Raises ValueError for a name that is not in IMPLEMENTATIONS."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r}; choose from {', '.join(IMPLEMENTATIONS)}")
    OPS.setdefault(op, {})[name] = Implementation(run, can, tiles, example, by_hand or name == "triton")


def load_implementations(op: str) -> None:
    """Import `seqblocks.kernels.<op>.<name>` for each implementation name that exists as a module or package."""
    for name in IMPLEMENTATIONS:
        module = f"seqblocks.kernels.{op}.{name}"
        if find_spec(module) is not None:
            importlib.import_module(module)


def implementation(op: str, name: str) -> Implementation:
    """Return a registered implementation. Raises KeyError if there is none."""
    return OPS[op][name]


def always(reason: str) -> Can:
    """Return a `can` for implementations that run wherever torch does, with this reason."""
    return lambda **facts: (True, reason)
