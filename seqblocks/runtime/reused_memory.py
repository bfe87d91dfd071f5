"""Memory of earlier states, used again for later ones.

The operating system clears each page of new memory, which takes longer than writing a large state. A stream therefore
writes a large state to the memory of the state before the last one, unless something still holds that memory: a
variable, a view, an array, an exported capsule. All of these hold the tensor's storage, and a storage counts its
holders. The current state is never written, so that an interrupted step leaves it as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 19  # bytes: smaller states mostly get memory that the process has already used

count_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # private to torch


class Spares:
    """The memory of the last two states of a stream, for each part that is large.

    It is used in inference mode only: the tensors that it returns are inference tensors.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[torch.UntypedStorage]] = {}  # by place: the older and the newer one

    def take(self, place: int, like: Tensor) -> Tensor | None:
        """Return memory for the next value of a part of the state whose value is now `like`, or None to allocate it.

        The values are undefined, and nothing else refers to this memory. place: a number for each part.
        """
        if type(like) is not Tensor or not like.is_contiguous() or not sees_holders():
            return None
        held = self._held.pop(place, [])  # another thread finds nothing at this place
        if len(held) > 1 and is_spare(held, like):
            memory = like.new_empty(0).set_(held[0], 0, like.shape)  # type: ignore[call-overload]
        else:
            memory = torch.empty_like(like)
        self._held[place] = [*held[-1:], memory.untyped_storage()]
        return memory


def is_spare(held: list[Any], like: Tensor) -> bool:
    """Return whether the first storage of a list has the size of `like`, and no other holder here or in a process."""
    return holders(held) == _alone() and not held[0].is_shared() and held[0].nbytes() == like.nbytes


def holders(held: list[Any]) -> tuple[int, int]:
    """Return the references of Python to the first storage of a list, and those of torch: tensors and the like."""
    assert count_uses
    return sys.getrefcount(held[0]), count_uses(held[0]._cdata)


@cache
def _alone() -> tuple[int, int]:
    """Return the counts of a storage that only a list holds."""
    return holders([torch.empty(1, device="cpu").untyped_storage()])


@cache
def sees_holders() -> bool:
    """Return whether this torch counts the holders of a storage; without the counts, no memory is used again."""
    kinds: list[Callable[[Tensor], Any]] = [lambda x: x, Tensor.detach, Tensor.untyped_storage, Tensor.__dlpack__]
    return count_uses is not None and all(map(_is_counted, kinds))


def _is_counted(hold: Callable[[Tensor], Any]) -> bool:
    """Return whether what `hold` returns for a tensor is counted as a holder of its storage until it is deleted."""
    x = torch.empty(1, device="cpu")
    held, other = [x.untyped_storage()], hold(x)
    del x
    with_holder = holders(held)
    del other
    return with_holder != _alone() and holders(held) == _alone()
