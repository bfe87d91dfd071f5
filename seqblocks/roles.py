"""Methods that a primitive may have for one part of the package alone, such as tensor parallelism or scans of images.

Each function here calls the method of its name, or returns what holds for a primitive without it. The wires are in the
order of the ports, as for the methods of `Op`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from seqblocks.errors import Fault
from seqblocks.op import Op
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

Wires = Iterable[Wire | None]
KernelCall = tuple[str, dict[str, Any]]  # a kernel, and the options that determine its implementation
Transition = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]  # from the state before tokens to the one after


def _asked(op: Op, method: str, *given: Any) -> Any:
    """Return the result of a method, or None if the class of the op has none."""
    found = getattr(type(op), method, None)
    return None if found is None else found(op, *given)


# --- rows and columns of images


def makes_grid(op: Op) -> bool:
    """Return whether `forward` sets new rows and columns for its output, with `call.set_grid`."""
    return bool(_asked(op, "makes_grid"))


def is_upright(op: Op, wires: Wires) -> bool:
    """Return whether the op distinguishes rows of an image from columns, so that no scan may swap them."""
    return bool(_asked(op, "is_upright", *wires))


def keeps_apart(op: Op, wires: Wires) -> bool:
    """Return whether a token reads only those of its own segment, if the call has `segments`.

    A shifted window at the edge of an image holds segments of both edges (`each`).
    """
    return bool(_asked(op, "keeps_apart", *wires))


# --- lengths


def joins_tokens(op: Op) -> bool:
    """Return whether a list of wires is joined along the tokens; otherwise it is joined along the features."""
    return bool(_asked(op, "joins_tokens"))


def turns_length_into_width(op: Op, wires: Wires) -> bool:
    """Return whether the features of the output follow from the number of tokens, or the size, of the inputs."""
    return bool(_asked(op, "turns_length_into_width", *wires))


# --- kernels and products


def calls(op: Op, wires: Wires) -> KernelCall | None:
    """Return the kernel that `forward` calls, and the options that determine its implementation."""
    found: KernelCall | None = _asked(op, "calls", *wires)
    return found


def may_be_matrix(op: Op) -> bool:
    """Return whether all that `forward` computes may be a product with one dense matrix, as returned by `matrix`.

    `matrix` may still return None for the arguments of this op.
    """
    cls = type(op)
    alone = len(op.ports) == 1 and op.reads == "token" and cls.state is Op.state and not makes_grid(op)
    return alone and cls.matrix is not Op.matrix and cls.prepare_token is Op.prepare_token and not op.random


# --- several ranks


class Split(NamedTuple):
    """A way to split an op over several ranks, each with an equal part of the features.

    op: the op that each rank computes. parts: the ports of which a rank reads only its part of the features. cuts: the
    parameters that are split, with the axis; all others are replicated. sums: whether the outputs of the ranks are
    summed; otherwise each is a part of the features. added: parameters that are added to the output, of which each
    rank then adds only its share.
    """

    op: Op
    parts: tuple[str, ...] = ()
    cuts: Mapping[str, int] = types.MappingProxyType({})
    sums: bool = False
    added: tuple[str, ...] = ()


def splits(op: Op, ranks: int, wires: Wires) -> Iterable[Split]:
    """Return the ways to split the op over this many ranks, by default according to `independent`.

    Without any, each rank computes the whole op. Raises Fault if heads or groups cannot be divided evenly.
    """
    wires = list(wires)
    found: Iterable[Split] | None = _asked(op, "splits", ranks, *wires)
    if found is not None:
        return found
    return evenly(op, ranks, op.independent, wires) if op.independent else []


def evenly(op: Op, ranks: int, what: str, wires: Iterable[Wire | None], whole: Iterable[str] = ()) -> list[Split]:
    """Return the split in which each rank computes a share of an op's features, or of the heads counted by `what`.

    whole: ports that are not split. A single head is not split. Raises Fault E401 if several heads cannot be split
    evenly.
    """
    wires = list(wires)
    count = 0 if what == "features" else getattr(op, what)
    if count == 1:
        return []
    if count % ranks:
        raise Fault("E401", f"{what} {count} cannot be split evenly over {ranks} ranks", at=what)
    local = op.model_copy(update={what: count // ranks} if count else {})
    parts = tuple(port.name for port, wire in zip(op.ports, wires, strict=True) if wire and port.name not in whole)
    return [Split(local, parts, dict.fromkeys(op.parameters(*wires), 0))]


def drops_samples(op: Op) -> bool:
    """Return whether it drops whole samples at random in training mode, for which ranks need the same numbers."""
    return bool(_asked(op, "drops_samples"))


def transition(op: Op, p: Mapping[str, Any], call: Any, inputs: Iterable[Any]) -> Transition | None:
    """Return the effect of these tokens on the state: a function from the state before them to the state after.

    Used for sequences split over several devices: the expensive part is computed before the state arrives, and the
    returned function is cheap. None means that `forward` is needed. `call` has resets but no state.
    """
    found: Transition | None = _asked(op, "transition", p, call, *inputs)
    return found
