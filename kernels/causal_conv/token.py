"""Single tokens of a depthwise causal convolution, with the taps in the layout that is fastest for one token.

B batch, D channels, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.token_function import TokenFunction

PRODUCT_MIN_TAPS = 8  # Fewer are added one by one; for more, one product of the whole window takes fewer operations.


def prepare(weight: Tensor, bias: Tensor | None, activation: str | None) -> TokenFunction:
    """Return the function (window [B, K - 1, D], x [B, D]) -> (y [B, D], the next window).

    weight [D, 1, K], bias [D]; activation None or "silu".
    """
    if torch.compiler.is_compiling():
        return _prepare_to_compile(weight, bias, activation)
    taps = weight[:, 0].t().contiguous()
    before, now, latest = taps[:-1], taps[-1], taps.shape[0] - 2
    if len(before) < PRODUCT_MIN_TAPS:
        return _prepare_few(before.unbind(0), now, bias, activation)

    def one(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (window * before).sum(1).addcmul_(x, now)
        if bias is not None:
            y += bias
        if activation == "silu":
            y = F.silu(y, inplace=True)
        return y, torch.cat([window.narrow(1, 1, latest), x.unsqueeze(1)], 1)

    return TokenFunction(one)


def _prepare_few(
    before: Sequence[Tensor], now: Tensor, bias: Tensor | None, activation: str | None
) -> TokenFunction:
    """Do the same for few taps, each [D]: products are added without a tensor of all of them."""

    def convolved(x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        y = x * now if bias is None else torch.addcmul(bias, x, now)
        for each, tap in zip(inputs, before, strict=True):
            y.addcmul_(each, tap)
        return F.silu(y, inplace=True) if activation == "silu" else y

    def one(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        inputs = window.unbind(1)
        return convolved(x, inputs), torch.stack([*inputs[1:], x], 1)

    def several(batch: int, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        inputs, count = torch.cat([*window.unbind(1), x]), len(x)
        y = convolved(x, [inputs.narrow(0, at * batch, count) for at in range(len(before))])
        return y, torch.stack(inputs.narrow(0, count, len(before) * batch).split(batch), 1)

    return TokenFunction(one, several, math.inf)


def _prepare_to_compile(weight: Tensor, bias: Tensor | None, activation: str | None) -> TokenFunction:
    """Do the same with taps that are not copied, as compiled code would copy them for each token.

    y is computed from the next window: torch's compiler would otherwise write the windows of all layers at the end, in
    one large kernel.
    """
    first, rest = weight[:, 0, 0], weight[:, 0, 1:].t()

    def one(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.cat([window[:, 1:], x.unsqueeze(1)], 1)
        y = (after * rest).sum(1).addcmul_(window[:, 0], first)
        if bias is not None:
            y += bias
        return F.silu(y) if activation == "silu" else y, after

    return TokenFunction(one)
