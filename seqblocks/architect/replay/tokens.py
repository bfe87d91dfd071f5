"""Steps on some of the tokens, or on tokens in another order: `each`, `choose` and `experts`."""

from __future__ import annotations

import math

from seqblocks import graph
from seqblocks.architect.replay.steps import ID_BYTES, Paths, Replay, Sizes, replays
from seqblocks.tape import Shape, Tape, Value
from seqblocks.types import Wire

Axes = list[tuple[str, int]]


@replays(graph.EachNode)
def _each(replay: Replay, node: graph.EachNode, inputs: list[Value], paths: Paths) -> Value:
    """Run the steps on all sequences at once, which are copies where their numbers do not lie in this order."""
    tape, (first, *others), (body,), outer = replay.tape, inputs, node.bodies.values(), replay.sizes
    before, after = _axes(node, first.shape)
    count = math.prod(size for name, size in before if name in ("batch", "lanes", "lanes_2"))
    padded = math.prod(size for name, size in before if name not in ("batch", "features"))
    is_padded = node.arguments.pad and padded > first.shape[1]
    shifted = node.arguments.shift > 0 and any(name.startswith("lanes") and size > 1 for name, size in before)
    wire = replay.spec.types[body.input]
    assert wire

    def cut(x: Value, axes: tuple[Axes, Axes], inside: Wire) -> Value:
        x = _resized(tape, x, (x.shape[0], padded, x.shape[2])) if is_padded else x
        x = _rolled(tape, x) if shifted else x
        return _reordered(tape, x, *axes, (count, *replay.sizes.shape(inside)[1:]))

    given = [cut(first, (before, after), wire)]
    whole = node.reads_whole(replay.spec.types)
    for x, number, is_whole in zip(others, body.ports.values(), whole, strict=True):
        inside = replay.spec.types[number]
        assert inside
        if is_whole:
            given.append(tape.copy(tape.expand(x, (count, *x.shape[1:]))))
        else:
            given.append(cut(x, _axes(node, x.shape), inside))
    replay.sizes = Sizes(count, replay.sizes.length)
    y = replay.inside(body, given, paths)
    replay.sizes, tape.step = outer, paths[-1]
    if len(y.shape) == 2:
        return tape.view(y, replay.sizes.shape(node.type) if node.type else y.shape)
    width = {"features": y.shape[-1], "seq": y.shape[1]}
    after, before = ([(name, width.get(name, size)) for name, size in axes] for axes in (after, before))
    shape = replay.sizes.shape(node.type) if node.type else y.shape
    y = _reordered(tape, y, after, before, (shape[0], padded, shape[2]) if is_padded else shape)
    y = _rolled(tape, y) if shifted else y
    return _resized(tape, y, shape) if is_padded else y


def _axes(node: graph.EachNode, shape: Shape) -> tuple[Axes, Axes]:
    """Return the axes of the input of an `each`, in the order before and after its sequences are part of the batch."""
    arguments, wire, (batch, tokens, features) = node.arguments, node.wires[0], shape
    size, (rows, columns) = arguments.width, (wire.grid if wire else None) or (1, 1)
    b, f = ("batch", batch), ("features", features)
    if arguments.axis == "features":
        lanes, seq, some = ("lanes", features // size), ("seq", tokens), ("features", size)
        return [b, seq, lanes, some], [b, lanes, seq, some]
    if arguments.axis == "windows":
        down, across = arguments.tiles((rows, columns))
        lanes, p, others, q = ("lanes", down), ("p", size), ("lanes_2", across), ("q", size)
        return [b, lanes, p, others, q, f], [b, lanes, others, p, q, f]
    if arguments.axis in ("frames", "rows"):
        length = size if arguments.axis == "frames" else columns
        axes = [b, ("lanes", tokens // length), ("seq", length), f]
        return axes, axes
    count = size if arguments.axis == "places" else columns
    lanes, seq = ("lanes", count), ("seq", tokens // count)
    return [b, seq, lanes, f], [b, lanes, seq, f]


def _rolled(tape: Tape, x: Value) -> Value:
    """Record torch's `roll` along two axes: along the first, then along the second."""
    once = tape.new(x.shape, x.item)
    y = tape.new(x.shape, x.item)
    del once
    tape.function([x], [y], (), x.bytes)
    return y


def _resized(tape: Tape, x: Value, shape: Shape) -> Value:
    """Record a copy with more or fewer rows and columns, whose derivative is a copy too."""
    y = tape.new(shape, x.item)
    tape.function([x], [y], (), x.bytes)
    return y


def _reordered(tape: Tape, x: Value, before: Axes, after: Axes, shape: Shape) -> Value:
    """Record axes in another order and with another shape: a copy, unless only axes of size 1 change places."""
    before, after = ([axis for axis in axes if axis[1] > 1] for axes in (before, after))
    return tape.view(x if before == after else tape.copy(x), shape)


@replays(graph.ChooseNode)
def _choose(replay: Replay, node: graph.ChooseNode, inputs: list[Value], paths: Paths) -> Value:
    """Run the steps on the chosen tokens, as many as `top` says, or on all tokens."""
    tape, (x, by, *others), body, outer = replay.tape, inputs, node.bodies[""], replay.sizes
    batch, tokens, features = x.shape
    count, rate = node.arguments.count(tokens), node.type.rate if node.type else 1
    order, sorted_scores = tape.new((batch, tokens), ID_BYTES), tape.new((batch, tokens), by.item)
    places = tape.new((batch, count), ID_BYTES)
    del order, sorted_scores
    whole = (False, *node.reads_whole(replay.spec.types))
    flat = [each if is_whole else tape.view(each, (batch * tokens, *each.shape[2:]))
            for each, is_whole in zip((x, *others), whole, strict=True)]
    given = []
    for each, is_whole in zip(flat, whole, strict=True):
        if not is_whole:
            part = tape.new((batch * count, *each.shape[1:]), each.item)
            tape.function([each], [part], [places])
            each = tape.view(part, (batch, count, *part.shape[1:]))
            del part
        given.append(each)
    replay.sizes = Sizes(batch, count * rate)
    y = replay.inside(body, given, paths)
    replay.sizes, tape.step = outer, paths[-1]
    y = tape.view(tape.cast(y, x.item), (batch * count, features))
    made = tape.new((batch * tokens, features), x.item)
    sums = 4 * made.numbers if x.item == 2 else 0  # torch scatters 16 bits by way of float32
    tape.passing(sums)
    sizes = [(each.shape, each.item) if each.tracked else None for each in (flat[0], y)]

    def backward(grads: list[Value | None]) -> list[Value | None]:
        of_x = sizes[0] and tape.new(*sizes[0])
        tape.passing(sums)
        return [of_x, sizes[1] and tape.new(*sizes[1])]

    tape.function([flat[0], y], [made], [places], backward)
    return tape.view(made, x.shape)


@replays(graph.ExpertsNode)
def _experts(replay: Replay, node: graph.ExpertsNode, inputs: list[Value], paths: Paths) -> Value:
    """Run the router and the experts, each on an equal share of the tokens."""
    tape, router = replay.tape, node.bodies[""].nodes[0]
    x, values = inputs[0], dict(zip(node.reads, inputs, strict=True))
    names = tuple(graph.join(path, router.name) for path in paths)
    logits = replay.node(router, [x], names)
    tokens, count, top = math.prod(x.shape[:-1]), node.arguments.count, node.arguments.top
    tape.step = paths[-1]
    correction = replay.parameter("correction", names) if node.arguments.corrected else None
    weights, held = _routed(tape, tape.view(logits, (tokens, count)), node, correction)
    replay.held += held  # the model keeps them for losses of the router
    order = tape.new((tokens * top,), ID_BYTES)
    labels = [label for label in node.bodies if label not in ("", graph.SHARED)]
    captured = (values[value] for value in node.bodies[labels[0]].captures)
    sizes = [tokens * top // count + (at < tokens * top % count) for at in range(count)]
    if node.arguments.capacity is not None:
        most = math.ceil(node.arguments.capacity * tokens * top / count)
        sizes = [min(size, most) for size in sizes]
        sizes.append(tokens * top - sum(sizes))  # choices of experts that are full
    sent = [tape.split(_sent(tape, each, order, top), sizes, 0) for each in (x, *captured)]
    results = []
    for at, label in enumerate(labels):
        below = tuple(graph.join(path, label) for path in paths)
        given = [part[at] for part in sent]
        if len(x.shape) > 2:
            given = [tape.view(each, (1, *each.shape), dense=each.dense) for each in given]
        y = replay.inside(node.bodies[label], given, below)
        results.append(tape.view(y, (sizes[at], y.shape[-1])))
        del given, y
    if len(sizes) > count:
        results.append(tape.new((sizes[count], results[0].shape[-1]), results[0].item))
    del sent
    tape.step = paths[-1]
    joined = tape.cat(results, 0)
    results.clear()
    y = tape.new(joined.shape, joined.item)
    tape.function([joined], [y], [order])
    item = y.item
    del joined
    weighted = tape.multiply(tape.view(y, (tokens, top, y.shape[-1])), tape.view(weights, (tokens, top, 1)))
    del weights, y
    found = tape.cast(tape.sum(weighted, (tokens, weighted.shape[-1])), item)
    del weighted
    found = tape.view(found, (*x.shape[:-1], found.shape[-1]))
    shared = node.bodies.get(graph.SHARED)
    if shared is None:
        return found
    given = [x, *(values[value] for value in shared.captures)]
    return tape.add(found, replay.inside(shared, given, tuple(graph.join(path, graph.SHARED) for path in paths)))


def _routed(
    tape: Tape, logits: Value, node: graph.ExpertsNode, correction: Value | None
) -> tuple[Value, list[Value]]:
    """Record the choice of experts. Returns the weights [tokens, top], and what the model holds after its call."""
    tokens, count = logits.shape
    scores = tape.unary(logits, ["output"])
    order, best = tape.new((tokens, count), ID_BYTES), tape.new((tokens, count), scores.item)
    if correction is not None:  # it chooses, and its gradient is zeros
        chosen = tape.slice(order, (tokens, node.arguments.top))
        weights = tape.new(chosen.shape, scores.item)
        tape.function([scores], [weights], [chosen])
        weights = tape.add(weights, tape.sum(correction, ()))
    else:
        tape.function([scores], [best], [order])
        weights = tape.slice(best, (tokens, node.arguments.top))
    if node.arguments.normalizes:
        weights = tape.divide(weights, tape.sum(weights, (tokens, 1)))
    if node.arguments.factor != 1.0:
        weights = tape.unary(weights, ())
    return weights, [logits, scores, order]


def _sent(tape: Tape, x: Value, order: Value, top: int) -> Value:
    """Record copies of each token for each of its experts, sorted by expert."""
    whole = (math.prod(x.shape[:-1]) * top, x.shape[-1])
    copies, y = tape.new(whole, x.item), tape.new(whole, x.item)
    tape.function([x], [copies])
    tape.function([copies], [y], [order])
    return y
