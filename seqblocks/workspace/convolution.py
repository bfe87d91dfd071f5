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
PAGE = 1 << 12  # numbers by which oneDNN rounds some buffers up
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
    if sizes.is_by_torch or (tape.converts and x.item == 2):  # so few numbers are not converted to float32
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
        is_small = is_one and x.numbers <= MIN_NUMBERS and min(self.taps[1:], default=1) <= 3
        self.is_by_torch = weight.item > 2 and (is_small or (self.is_pointwise and self.batch < MIN_BATCH))
        self.is_plain = groups == 1 and features in PLAIN_FEATURES
        self.reads_plain = self.is_plain and (features <= MAX_READ_FEATURES or weight.item == 2)

        self.each = math.prod(self.taps) * weight.item
        self.windows = (out * self.before if self.grows else self.in_group * places) * self.each
        self.product = 4 * weight.numbers * max(weight.item, 4) + self.windows  # of matrices, for the weight's gradient
        self.in_parts = self.batch * places * out * x.item if self.grows and places % self.before else 0  # transposed
        self.out_blocks = groups * _blocked(out // groups)  # features of all groups
        has_avx512, is_narrow = BLOCK == 16, dilation == 1 and max(self.taps) <= MAX_DEPTHWISE_TAPS
        self.has_kernel = self.is_depthwise and is_narrow and not (has_avx512 and places < math.prod(self.taps))
        span = (self.taps[-1] - 1) * dilation + 1
        is_spread = len(self.taps) > 1 and dilation > 1 and math.isqrt(self.before) < span
        self.exceeds = is_spread or (not has_avx512 and self.before < math.prod(self.taps))  # windows exceed the maps
        self.blocks = self._blocks()
        self.scratch = self._scratch() if weight.item == 2 else 0

    def _blocks(self) -> int:
        """Return the bytes of the weight's gradient in blocks of features."""
        if self.has_kernel:
            return self.weight.bytes
        if self.exceeds:
            return self.product
        return self.out_blocks * self._read_features * self.each

    @property
    def _read_features(self) -> int:
        """The features of a group of x for which the weight's gradient has room."""
        return self.features if self.reads_plain else _blocked(self.in_group)

    def _scratch(self) -> int:
        """Return the bytes that the gradient of a 16-bit weight needs besides (AVX512-BF16).

        It is added up in float32. Its instructions read two tokens at a time: each image and its gradient are
        transposed in turn, but for the maps of an image that lie one after the other.
        """
        sums = self.blocks * 4 // self.weight.item
        if self.has_kernel:
            return sums
        is_read = self.reads_plain and (self.features == 1 or not self.x.is_channels_last)
        tokens = 0 if is_read else self.before + math.isqrt(self.before) * self._margin
        turned = self.groups * self._read_features * tokens + self.out_blocks * self.shape[1]
        return sums + turned * self.weight.item

    def of_strided(self) -> int:
        """Return the bytes that the gradient of x needs where windows are at least two tokens apart, else 0.

        The weight is copied into blocks, and each image of gradients, with a margin, in turn.
        """
        is_other = self.groups > 1 and (self.weight.item > 2 or not (self.is_depthwise or self.x.is_channels_last))
        if self.grows or not self.resizes or not self.x.tracked or is_other:
            return 0
        rows = math.isqrt(self.shape[1]) + 2 * (self.taps[-1] // 4)
        pair = 2 // self.weight.item + 1  # numbers of 16 bits that are read at a time
        outputs = self.groups * -(-self.shape[2] // (self.groups * pair)) * pair
        image = -(-outputs * max(rows**2, self.shape[1]) // PAGE) * PAGE * self.weight.item
        return _blocked(self.in_group) * outputs * self.each + image

    @property
    def _margin(self) -> int:
        """The tokens by which a row of a square image is padded, an even number."""
        return 0 if self.is_pointwise or len(self.taps) == 1 else 2 * (self.taps[-1] // 4 + 1)


def _by_matrices(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the result of products of matrices by torch, of each group, and the bytes that the backward pass needs."""
    needs = 0 if sizes.is_pointwise else sizes.batch * sizes.windows + sizes.x.is_channels_last * sizes.weight.bytes
    copies = tape.new((needs,), 1)
    y = tape.new(sizes.shape, sizes.x.item)
    del copies
    tape.passing(y.bytes * (sizes.groups > 1))
    return y, needs


def _in_order(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the same of maps whose features are next to each other."""
    weight = sizes.weight
    ordered = tape.new(weight.shape, weight.item)
    is_product = sizes.exceeds or (max(sizes.taps) > MAX_TAPS and not sizes.is_depthwise)
    needs = max(sizes.blocks + sizes.scratch, 2 * weight.bytes + max(weight.bytes, sizes.blocks))
    needs = max(weight.bytes + sizes.product if is_product else needs, sizes.of_strided())
    y = tape.new(sizes.shape, sizes.x.item)
    tape.passing(weight.bytes + sizes.in_parts)
    del ordered
    return y, needs


def _in_blocks(tape: Tape, sizes: _Sizes) -> tuple[Value, int]:
    """Return the same of maps that are copied into blocks of features."""
    x, weight, (batch, places, out) = sizes.x, sizes.weight, sizes.shape
    is_grouped = 1 < sizes.groups < sizes.features
    features = math.gcd(sizes.in_group, out // sizes.groups) if is_grouped else BLOCK  # that fit into blocks
    is_mixed = features % 8 > 0
    blocks = weight.bytes if is_grouped else sizes.blocks  # of 8 features, where 16 do not fit
    blocked_x, blocked_out = (sizes.features, out) if is_grouped else (_blocked(sizes.features), _blocked(out))
    of_x = sizes.before * batch * blocked_x * x.item
    of_y = tape.new((batch, places, blocked_out), x.item)
    sums = 4 * sizes.before * max(out, sizes.features) // sizes.groups if x.item == 2 else 0  # of a group, in float32
    tape.passing(sizes.windows + sums if is_mixed else of_x * (not sizes.is_plain) + weight.bytes + sizes.in_parts)
    y = tape.new(sizes.shape, x.item)
    tape.passing(y.bytes if sizes.grows and sizes.resizes else 0)
    is_half = x.item == 2
    is_product = features % (16 if is_half else 8) > 0 or (is_half and sizes.reads_plain and out % BLOCK > 0)
    is_product |= sizes.exceeds or max(sizes.taps) > (MAX_DEPTHWISE_TAPS if sizes.is_depthwise else MAX_TAPS)
    made = weight.bytes if weight.tracked else 0  # its gradient: copied from blocks when those of y are freed
    read = of_x * (not sizes.reads_plain)
    of_weight = sizes.product if is_product else max(blocks, of_y.bytes + read + blocks - made + sizes.scratch)
    written = of_x - x.bytes + _blocked(out) * _blocked(sizes.features) * sizes.each - made
    least = of_y.bytes + (written if sizes.reads_plain else weight.bytes)
    strided = sizes.of_strided()
    is_ordered = strided > 0 or (sizes.resizes and sizes.groups == 1)  # the gradients lie as those of tokens
    of_gradient = max(2 * x.bytes, y.bytes + strided - made) if is_ordered else max(least, of_x)
    of_gradient = max(4 * sizes.windows // x.item + sums, x.bytes) if is_mixed else of_gradient
    del of_y
    return y, max(of_weight, of_gradient * x.tracked)


def _blocked(features: int) -> int:
    return -(-features // BLOCK) * BLOCK
