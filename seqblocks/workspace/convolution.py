"""Convolutions of tokens and images by oneDNN, which torch calls on a CPU, and by products of matrices."""

from __future__ import annotations

import math
from collections.abc import Collection

from seqblocks.tape import Shape, Tape, Value

BLOCK = 16  # features that oneDNN computes together, with AVX-512
MAX_TAPS = 14  # of a window: for wider ones, the weight's gradient is a product of matrices (AMD EPYC, Zen 4)
MAX_DEPTHWISE_TAPS = 3  # oneDNN's kernel for the gradient of a depthwise weight reads at most this many in a row
MIN_BATCH = 16  # images: for fewer, torch computes windows of one token on one thread by itself
MIN_NUMBERS = 20480  # of one image or sequence: smaller ones, too, unless windows have more than 3 x 3 tokens
PLAIN_FEATURES: Collection[int] = range(1, 16)  # of maps that oneDNN reads as they are, with AVX-512
MAX_READ_FEATURES = 8  # of maps whose gradient of the weight it computes from them as they are (AMD EPYC, Zen 5)


def convolve(
    tape: Tape, x: Value, weight: Value, bias: Value | None, *, shape: Shape, groups: int = 1, dilation: int = 1
) -> Value:
    """Record a convolution of tokens or images x with weight [O, I, taps], in groups. Returns tokens [B, S, O].

    oneDNN reads maps whose features are next to each other as they are. It copies others into blocks of features, but
    for the few features of an image, and its result out of them.
    """
    sizes = _Sizes(x, weight, shape, groups, dilation)
    copy = None if x.whole else tape.new(x.shape, x.item)
    if sizes.is_small or (sizes.is_pointwise and sizes.batch < MIN_BATCH):
        y, needs = _by_matrices(tape, sizes)
    else:
        y, needs = (_in_order if x.is_channels_last else _in_blocks)(tape, sizes)
    y.turn(not x.is_channels_last)
    tape.function([x, weight, bias], [y], [x, weight], needs + (copy.bytes if copy else 0), turned=y.bytes)
    return y


class _Sizes:
    """The sizes of a convolution, and the bytes of what it may copy."""

    def __init__(self, x: Value, weight: Value, shape: Shape, groups: int, dilation: int) -> None:
        self.x, self.weight, self.shape, self.groups, self.taps = x, weight, shape, groups, weight.shape[2:]
        self.batch, places, out = shape
        self.features = features = x.shape[1 if len(x.shape) == 4 else -1]
        self.before, self.in_group = x.numbers // (self.batch * features), features // groups
        self.grows = places > self.before
        self.resizes = max(places, self.before) >= 2 * min(places, self.before)
        self.is_depthwise, self.is_pointwise = groups == features > 1, math.prod(self.taps) == 1 and not self.resizes
        is_one = self.batch * groups == 1
        self.is_small = is_one and x.numbers <= MIN_NUMBERS and min(self.taps[1:], default=1) <= 3
        self.is_plain = groups == 1 and features in PLAIN_FEATURES
        self.reads_plain = self.is_plain and features <= MAX_READ_FEATURES

        self.each = math.prod(self.taps) * weight.item
        self.windows = (out * self.before if self.grows else self.in_group * places) * self.each
        self.product = 4 * weight.bytes + self.windows  # of matrices, for the gradient of the weight
        self.in_parts = self.batch * places * out * x.item if self.grows and places % self.before else 0  # transposed
        self.blocks = self._blocks(dilation)

    def _blocks(self, dilation: int) -> int:
        """Return the bytes of the weight's gradient in blocks of features."""
        is_tiny, has_avx512 = self.is_depthwise and self.shape[1] < math.prod(self.taps), BLOCK == 16
        has_kernel = self.is_depthwise and dilation == 1 and max(self.taps) <= MAX_DEPTHWISE_TAPS
        if has_kernel and not (is_tiny and has_avx512):
            return self.weight.bytes
        if is_tiny and not has_avx512:
            return self.product
        width = self.features if self.reads_plain else _blocked(self.in_group)
        return self.groups * _blocked(self.shape[2] // self.groups) * width * self.each


def _by_matrices(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the result of a product of matrices by torch, and the bytes that the backward pass needs."""
    needs = 0 if sizes.is_pointwise else sizes.windows + sizes.x.is_channels_last * sizes.weight.bytes
    copies = tape.new((needs,), 1)
    y = tape.new(sizes.shape, sizes.x.item)
    del copies
    return y, needs


def _in_order(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the same of maps whose features are next to each other."""
    weight = sizes.weight
    ordered = tape.new(weight.shape, weight.item)
    is_product = max(sizes.taps) > MAX_TAPS and not sizes.is_depthwise
    needs = weight.bytes + (sizes.product if is_product else weight.bytes + max(weight.bytes, sizes.blocks))
    y = tape.new(sizes.shape, sizes.x.item)
    tape.passing(weight.bytes + sizes.in_parts)
    del ordered
    return y, needs


def _in_blocks(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the same of maps that are copied into blocks of features."""
    x, weight, (batch, places, out) = sizes.x, sizes.weight, sizes.shape
    is_grouped = 1 < sizes.groups < sizes.features
    is_mixed = is_grouped and sizes.in_group % 8 > 0
    blocks = weight.bytes if is_grouped else sizes.blocks  # of 8 features, where 16 do not fit
    of_x = sizes.before * batch * _blocked(sizes.features) * x.item
    of_y = tape.new((batch, places, _blocked(out)), x.item)
    tape.passing(sizes.windows if is_mixed else of_x * (not sizes.is_plain) + weight.bytes + sizes.in_parts)
    y = tape.new(sizes.shape, x.item)
    tape.passing(y.bytes if sizes.grows and sizes.resizes else 0)
    is_product = is_mixed or max(sizes.taps) > (MAX_DEPTHWISE_TAPS if sizes.is_depthwise else MAX_TAPS)
    made = weight.bytes if weight.tracked else 0  # its gradient: copied from blocks when those of y are freed
    read = of_x * (not sizes.reads_plain)
    of_weight = sizes.product if is_product else max(blocks, of_y.bytes + read + blocks - made)
    written = of_x - x.bytes + _blocked(out) * _blocked(sizes.features) * sizes.each - made
    least = of_y.bytes + (written if sizes.reads_plain else weight.bytes)
    of_gradient = max(least, 2 * x.bytes if sizes.resizes else of_x) if x.tracked else 0
    del of_y
    return y, max(of_weight, of_gradient)


def _blocked(features: int) -> int:
    return -(-features // BLOCK) * BLOCK
