"""One token of the sLSTM, with the recurrent weights of each head as one matrix.

B batch, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.token_function import ReadMap, TokenFunction

Gates = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]
PADDED_MAX_ELEMENTS = 1 << 16  # of a token's single product, half of them zeros: more take longer to read


def prepare(recurrent: Tensor, biases: Sequence[Tensor]) -> TokenFunction:
    """Return the function (y, c, n, m [B, H, D], i, f, z, o [B, H * D]) -> (y [B, H * D], the next y, c, n, m).

    recurrent [H, D, 4, D], biases [H, D] of i, f, z, o. It computes the same values as `slstm`.
    """
    gates = (_gates_to_compile if torch.compiler.is_compiling() else _gates)(recurrent.flatten(2), biases)
    return TokenFunction(_cell(gates), of_maps=partial(_of_maps, recurrent, biases))


def _of_maps(recurrent: Tensor, biases: Sequence[Tensor], maps: Sequence[ReadMap]) -> TokenFunction | None:
    """Return the function of `prepare` with other inputs, the values whose maps are i, f, z, o.

    The recurrence is added to the product of the maps where that product is, and copied once. Each map needs as many
    blocks as there are heads.
    """
    if any(len(weight) != len(recurrent) for weight, *_ in maps):
        return None
    biases = [bias if b is None else bias + b.view_as(bias) for bias, (_, b, _) in zip(biases, maps, strict=True)]
    parts = [_JoinedGates(recurrent, biases, maps, at) for at in dict.fromkeys(at for *_, at in maps)]
    of_parts, rows = _gates_of_parts(parts), recurrent.shape[1] + sum(part.weight.shape[1] for part in parts)
    if rows * recurrent[:, 0].numel() > PADDED_MAX_ELEMENTS:
        return TokenFunction(_cell(of_parts))
    bias = torch.cat([*biases], -1).unsqueeze(1)
    of_one = _gates_of_one(_padded(recurrent, parts), bias, [part.at for part in parts])
    return TokenFunction(_cell(lambda y, inputs: (of_one if y.shape[0] == 1 else of_parts)(y, inputs)))


def _cell(gates: Gates) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of one token. gates: computes these, with recurrence and bias, from output and inputs."""

    def one(y: Tensor, c: Tensor, n: Tensor, m: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        i, f, z, o = gates(y, inputs)
        through = F.logsigmoid(f).add_(m)
        # Before the first token, n is 0 and m has no meaning. A comparison with 0 takes twice as long.
        m = torch.where(torch.logical_not(n), i, torch.maximum(i, through))
        write, keep = (i - m).exp_(), through.sub_(m).clamp_(max=0.0).exp_()
        c = z.tanh().mul_(write).addcmul_(keep, c)
        n = write.addcmul_(keep, n)
        y = o.sigmoid().mul_(c).div_(n)
        return torch.view_copy(y, (-1, y.shape[1] * y.shape[2])), y, c, n, m

    return one


def _gates(matrix: Tensor, biases: Sequence[Tensor]) -> Gates:
    """Return f(y, the inputs of i, f, z, o) -> i, f, z, o [B, H, D] with recurrence and bias. matrix [H, D, 4 D]."""
    H, D, _ = matrix.shape
    bias = torch.stack([*biases], 1).view(H, 1, 4 * D)

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        recurrent = torch.baddbmm(bias, y.transpose(0, 1), matrix)  # [H, B, 4 D]
        return torch.cat([*inputs], 1).view(-1, 4, H, D).add_(recurrent.view(H, -1, 4, D).permute(1, 2, 0, 3)).unbind(1)

    return gates


def _gates_to_compile(matrix: Tensor, biases: Sequence[Tensor]) -> Gates:
    """Return the function of `_gates` as operations that torch's compiler puts into one kernel for one sequence.

    It would call a library for `baddbmm`, and its code for joined gates takes longer to compile.
    """
    H, D, _ = matrix.shape

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        recurrent = torch.bmm(y.transpose(0, 1), matrix).transpose(0, 1).split(D, -1)  # [B, H, D] each
        each = zip(inputs, recurrent, biases, strict=True)
        return [x.view(-1, H, D) + part + bias for x, part, bias in each]

    return gates


class _JoinedGates:
    """The P gates that are maps of the same value, which is the one at `at`. places: theirs among i, f, z, o.

    weight [H, I, P * D], recurrent [H, D, P * D], bias [H, 1, P * D].
    """

    def __init__(self, recurrent: Tensor, biases: Sequence[Tensor], maps: Sequence[ReadMap], at: int) -> None:
        self.at, self.places = at, [place for place, (*_, source) in enumerate(maps) if source == at]
        self.weight = torch.cat([maps[place][0].mT for place in self.places], -1)
        self.recurrent = recurrent[:, :, self.places].flatten(2)
        self.bias = torch.cat([biases[place] for place in self.places], -1).unsqueeze(1)

    def __call__(self, y: Tensor, x: Tensor) -> Sequence[Tensor]:
        """Return the gates [B, H, D] of the last output y [B, H, D] and the value x [B, H * I]."""
        H, I, _ = self.weight.shape
        gates = torch.baddbmm(self.bias, x.view(-1, H, I).transpose(0, 1), self.weight)  # [H, B, P * D]
        gates = gates.baddbmm_(y.transpose(0, 1), self.recurrent).view(H, -1, len(self.places), y.shape[2])
        return gates.permute(2, 1, 0, 3).contiguous().unbind(0)


def _gates_of_parts(parts: Sequence[_JoinedGates]) -> Gates:
    places = [place for part in parts for place in part.places]
    order = [places.index(place) for place in range(len(places))]

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        made = [gate for part in parts for gate in part(y, inputs[part.at])]
        return [made[place] for place in order]

    return gates


def _padded(recurrent: Tensor, parts: Sequence[_JoinedGates]) -> Tensor:
    """Return the weights [H, D + the sum of I, 4 D] of the last output and of all values, padded with zeros."""
    rows = [recurrent]
    for part in parts:
        weight = recurrent.new_zeros(*part.weight.shape[:2], *recurrent.shape[2:])
        weight[:, :, part.places] = part.weight.unflatten(-1, (-1, recurrent.shape[3]))
        rows.append(weight)
    return torch.cat(rows, 1).flatten(2)


def _gates_of_one(matrix: Tensor, bias: Tensor, places: Sequence[int]) -> Gates:
    """Return the function of `_gates_of_parts` for one sequence: a single product, as calls take most of the time."""

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        _, H, D = y.shape
        whole = torch.cat([y, *(inputs[at].view(1, H, -1) for at in places)], -1)
        return torch.baddbmm(bias, whole.transpose(0, 1), matrix).transpose(0, 1).split_with_sizes((D,) * 4, -1)

    return gates
