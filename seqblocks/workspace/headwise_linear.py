"""The block-diagonal linear map, tile by tile (kernels/headwise_linear/)."""

from __future__ import annotations

from seqblocks.tape import Tape, Value

TILE_FEATURES = 32


def product(tape: Tape, x: Value, weight: Value, bias: Value | None) -> Value:
    """Record the product of x [..., G * I] and weight [G, O, I]."""
    if len(weight.shape) == 2:  # all blocks share one
        blocks = tape.view(x, (*x.shape[:-1], x.shape[-1] // weight.shape[1], weight.shape[1]))
        y = tape.product(blocks, weight, bias)
        return tape.view(y, (*x.shape[:-1], y.shape[-1] * y.shape[-2]))
    G, O, I = weight.shape
    width = max(I, O)
    join = max([1, *[n for n in range(2, min(G, TILE_FEATURES // max(width, 1)) + 1) if G % n == 0]])
    if join > 1:
        tiles = tape.new((G // join, join * O, join * I), weight.item)
        tape.function([weight], [tiles])
        weight = tiles
    x = tape.rows(x)
    shape = (*x.shape[:-1], G * O)
    y = tape.new(shape, x.item)
    size, of_weight, item = (x.shape, x.item), (weight.shape, weight.item), x.item
    tracked = x.tracked

    def backward(grads: list[Value | None]) -> list[Value | None]:
        found = tape.new(*size).again(dense=False) if tracked else None
        return [found, tape.new(*of_weight)]

    tape.function([x, weight], [y], [x, weight], backward)
    y = tape.copy(y, item)
    return y if bias is None else tape.add(y, bias)
