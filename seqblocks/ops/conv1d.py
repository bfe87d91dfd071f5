"""Dense and grouped convolutions over tokens, with a stride.   D features, O features out, K taps, G groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from seqblocks.op import Op, argument, primitive
from seqblocks.ops.rate import check_tokens, merged_tokens, split_tokens
from seqblocks.ops.shift import lagged, window_after, with_past, with_past_memory
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Tokens, Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import Transition
    from seqblocks.runtime.call import Call

MAX_WINDOW_TOKENS = 2**16  # kernel, stride, dilation

# Copying the taps of each token next to each other, for one product, takes longer than torch's convolution for this
# many values, and for more tokens than features. For fewer tokens, the convolution mostly copies the weight.
CONVOLUTION_MIN_PRODUCTS = 1 << 15


def as_image(x: Tensor) -> Tensor:
    """View tokens [B, S, D] as an image of one row [B, D, 1, S], channels-last in memory, without a copy."""
    return x.mT.unsqueeze(2)


def as_tokens(image: Tensor) -> Tensor:
    """View an image of one row as tokens."""
    return image.squeeze(2).mT


class _Conv(Op):
    """Base of both convolutions: a weight, a bias, and a state with the inputs that the next frame needs."""

    reads = "past"
    features: int = argument(..., "width of the output, O", ge=1)
    kernel: int = argument(..., "number of taps, K", ge=1, le=MAX_WINDOW_TOKENS)
    groups: int = argument(1, "number of groups of features that are convolved separately, G", ge=1)
    causal: bool = argument(
        True, "whether an output depends only on its own frame and the past; otherwise the step cannot stream"
    )
    bias: bool = argument(True, "whether to add a bias")

    def earlier(self) -> int:
        """Return how many input tokens before a frame its output depends on."""
        raise AssertionError

    def later(self) -> int:
        """Return by how many tokens its windows are shifted towards the future: 0 if it is causal."""
        raise AssertionError

    def weight_shape(self, x: Wire) -> tuple[int, int, int]:
        raise AssertionError

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        shape = self.weight_shape(x)
        fan_in = shape[1] * shape[2]
        out = {"weight": Parameter(shape, Init("fan_in_uniform"), fan_in=fan_in)}
        if self.bias:
            out["bias"] = Parameter((self.features,), Init("fan_in_uniform"), decay=False, fan_in=fan_in)
        return out

    def state(self, x: Wire) -> dict[str, State]:
        carried = 0 if self.later() else self.earlier()
        return {"window": State((carried, x.features), "model")} if carried else {}

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        return window_after(x, self.earlier(), call)

    def looks_back(self, x: Wire) -> Tokens:
        return (self.earlier() - self.later()) * x.rate  # with a stride of 1, see `Op.looks_back`

    def check_groups(self, x: Wire) -> None:
        must_divide(self.groups, x.features, "groups", "the width of the input")
        must_divide(self.groups, self.features, "groups", "features")

    def cannot_stream(self, x: Wire) -> str | None:
        return "it reads later tokens (causal: false)" if self.later() else None


@primitive("conv1d")
class Conv1d(_Conv):
    """Convolution over tokens with one output token per `stride` input tokens. Weight [O, D / G, K], as torch's Conv1d.

    The last tap reads the last token of a frame of `stride` tokens, the others the tokens before it, `dilation` apart,
    with zero padding before the sequence. `causal: false` centres the window on the frame, with zero padding at both
    ends. With a stride, a stream takes whole frames, and resets are an error. State: the inputs that the next frame
    needs, [(K - 1) dilation + 1 - stride, D], oldest first.

    There is no argument `padding`. For a convolution without any, drop the outputs that read zeros: `slice: {first: N}`
    with N = ((K - 1) dilation + 1 - stride) / stride. If N is no whole number, its windows do not end with a frame, and
    it cannot be written.
    """

    stride: int = argument(1, "input tokens per output token", ge=1, le=MAX_WINDOW_TOKENS)
    dilation: int = argument(1, "distance between taps, in tokens", ge=1, le=MAX_WINDOW_TOKENS)

    def span(self) -> int:
        """Return the number of tokens that the window covers."""
        return (self.kernel - 1) * self.dilation + 1

    def earlier(self) -> int:
        return max(self.span() - self.stride, 0)

    def later(self) -> int:
        return 0 if self.causal else self.earlier() // 2

    def shape(self, x: Wire) -> Wire:
        self.check_groups(x)
        made = merged_tokens(x, self.stride, "stride") if self.stride > 1 else x
        return made.with_features(self.features)

    def weight_shape(self, x: Wire) -> tuple[int, int, int]:
        return self.features, x.features // self.groups, self.kernel

    def macs(self, x: Wire) -> int:
        return self.features * (x.features // self.groups) * self.kernel

    def looks_ahead(self, x: Wire) -> Tokens:
        return x.rate * (self.stride - 1 + self.later())

    def ignores_resets(self, x: Wire) -> str | None:
        if self.stride > 1:
            return "a window may span two sequences"
        return "it reads tokens on both sides" if self.later() else None

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace.convolution import convolve

        later, earlier, (batch, tokens, _) = self.later(), self.earlier(), x.shape
        if later:
            x = tape.pad(x, (batch, tokens + earlier, x.shape[2]))
        elif earlier:
            x = with_past_memory(tape, x, earlier)
        elif self.stride > self.span():
            x = tape.slice(x, (batch, tokens - self.stride + self.span(), x.shape[2]))
        run = partial(convolve, tape, shape=tape.out, groups=self.groups, dilation=self.dilation)
        return tape.in_float32(run, x, p["weight"], p.get("bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from torch.nn.functional import pad

        check_tokens(x, self.stride, self.verb)
        weight, bias, earlier, later = p["weight"], p.get("bias"), self.earlier(), self.later()
        if later:
            return self.convolve(pad(x, (0, 0, earlier - later, later)), weight, bias), {}
        if not earlier:
            unread = self.stride - self.span()  # tokens of a frame that is longer than the window
            return self.convolve(x[:, unread if self.causal else unread // 2 :], weight, bias), {}
        past = with_past(x, earlier, call)
        if past.limit is None:
            return self.convolve(past.tokens, weight, bias), past.state
        y: Any = 0
        for tap in range(self.kernel):
            lag = (self.kernel - 1 - tap) * self.dilation
            y = y + self.convolve(lagged(past, lag, earlier), weight[..., tap : tap + 1], None if tap else bias)
        return y, past.state

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        by, every, stride = self.earlier(), self.dilation, self.stride
        if self.later() or self.groups > 1 or (stride > 1 and not by):
            return None
        import torch

        from seqblocks.kernels.products import prepare_linear

        product = prepare_linear(p["weight"].flatten(1), p.get("bias"))
        if not by:
            return TokenFunction(product)

        def step(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            tokens = torch.cat([window, x.unsqueeze(1)], 1)
            return product(tokens[:, ::every].mT.flatten(1)), tokens[:, 1:].clone(memory_format=torch.contiguous_format)

        def convolved(batch: int, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            tokens = torch.cat([window, x.reshape(-1, batch, x.shape[1]).transpose(0, 1)], 1)
            y = self.convolve(tokens, p["weight"], p.get("bias")).transpose(0, 1).flatten(0, 1)
            return y, tokens[:, tokens.shape[1] - by :].clone(memory_format=torch.contiguous_format)

        def several(batch: int, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            if x.shape[0] >= self.features and x.numel() * self.kernel >= CONVOLUTION_MIN_PRODUCTS:
                return convolved(batch, window, x)
            tokens = torch.cat([window.transpose(0, 1), x.reshape(-1, batch, x.shape[1])])  # [by + seq, B, D]
            seq = tokens.shape[0] - by
            after = tokens[seq:].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            taps = torch.stack(
                [tokens[lag : lag + seq - stride + 1 : stride] for lag in range(0, by + stride, every)], -1
            )
            return product(taps.flatten(2).flatten(0, 1)), after

        return TokenFunction(step, several, math.inf)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x [B, S, D] without padding."""
        from torch.nn.functional import conv2d

        from seqblocks.kernels.numerics import in_float32

        if x.shape[1] < (weight.shape[2] - 1) * self.dilation + 1:  # the sequence is empty
            return x.new_zeros(x.shape[0], 0, self.features)
        run = partial(conv2d, stride=(1, self.stride), dilation=(1, self.dilation), groups=self.groups)
        return as_tokens(in_float32(run, as_image(x), weight.unsqueeze(2), bias))


@primitive("conv_transpose1d")
class ConvTranspose1d(_Conv):
    """Transposed convolution, `stride` output tokens per input token. Weight [D, O / G, K], as torch's ConvTranspose1d.

    Tap k of token j is added to output token j stride + k, so that each output depends on its own input token and on
    earlier ones. Outputs after the last frame are cropped. `causal: false` crops the same number at both ends.
    A stream takes whole frames, and resets are an error. State: the last inputs, [(K - 1) // stride, D], oldest first.
    """

    stride: int = argument(..., "output tokens per input token", ge=1, le=MAX_WINDOW_TOKENS)

    def earlier(self) -> int:
        return (self.kernel - 1) // self.stride

    def later(self) -> int:
        return 0 if self.causal else -(-max(self.kernel - self.stride, 0) // 2)

    def shape(self, x: Wire) -> Wire:
        self.check_groups(x)
        made = split_tokens(x, self.stride) if self.stride > 1 else x
        return made.with_features(self.features)

    def weight_shape(self, x: Wire) -> tuple[int, int, int]:
        return x.features, self.features // self.groups, self.kernel

    def macs(self, x: Wire) -> int:
        return x.features * (self.features // self.groups) * self.kernel // self.stride

    def looks_ahead(self, x: Wire) -> Tokens:
        return self.later() * x.rate * Fraction(1, self.stride)

    def ignores_resets(self, x: Wire) -> str | None:
        return "a token contributes to several outputs"

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace.convolution import convolve

        if self.earlier() and not self.later():
            x = with_past_memory(tape, x, self.earlier())
        batch, tokens, _ = x.shape
        made = (tokens - 1) * self.stride + max(self.kernel, self.stride)
        y = convolve(tape, x, p["weight"], p.get("bias"), shape=(batch, made, self.features), groups=self.groups)
        return tape.slice(y, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from torch.nn.functional import conv_transpose2d

        state: dict[str, Tensor] = {}
        length, first = x.shape[1] * self.stride, self.later()
        if self.earlier() and not first:
            x, _, state = with_past(x, self.earlier(), call)
            first = self.earlier() * self.stride
        if not length:
            return x.new_zeros(x.shape[0], 0, self.features), state
        uncovered = max(self.stride - self.kernel, 0)  # tokens of a frame that no tap covers
        weight, stride = p["weight"].unsqueeze(2), (1, self.stride)
        y = conv_transpose2d(as_image(x), weight, p.get("bias"), stride, 0, (0, uncovered), self.groups)
        return as_tokens(y)[:, first : first + length], state
