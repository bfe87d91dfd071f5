"""Compute the lookahead of each value: how many later tokens of the model's input a position may depend on.

Token j of a wire with rate r (`Wire.rate`) has position r * j, that of the first input token it is computed from;
tokens that were split have positions between those of input tokens. A position depends on its inputs, and an op adds
`Op.looks_ahead`. An op that combines several tokens into one reads whole windows; nested windows end together, so their
lookaheads do not add up. A scan in reverse turns the earlier tokens that an op reads (`Op.looks_back`) into later ones.
In other orders, they may be anywhere in the sequence.

Only tokens of the streaming input count. Values that depend on other inputs alone have no lookahead. A vector computed
from the whole sequence and broadcast to its tokens looks ahead to the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from seqblocks import graph
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.record import Record
from seqblocks.types import Rate, Tokens, Wire, common_rate

WHOLE = math.inf  # the whole sequence
SEQUENCES = ("sequence", "tokens")


class Ahead(NamedTuple):
    """The lookahead of a value: the rest of a window of `window` input tokens, and `extra` further tokens.

    A negative number means that only earlier tokens are read, as after a shift.

    A second bound is the rest of a frame of `frame` tokens, a multiple of all windows so far, and `later` further
    tokens. It is the smaller one if windows do not end together.

    `first` is the step that introduces the lookahead, or makes it unbounded. `mixes`: whether the value depends on
    other tokens of the input of the enclosing scan, earlier or later. `context`: whether it depends on no token at all.
    """

    window: Rate = 1
    extra: Tokens = 0
    first: tuple[str, Node] | None = None  # its path, and the step
    mixes: bool = False
    context: bool = False
    frame: Rate = 1
    later: Tokens = 0

    @property
    def tokens(self) -> Tokens:
        """Return the number of later tokens that the value may depend on."""
        return max(self.bound, 0)

    @property
    def bound(self) -> Tokens:
        """Return the position of the last token that the value may depend on, relative to its own."""
        return min(self.window - 1 + self.extra, self.frame - 1 + self.later)


CONTEXT = Ahead(context=True)

Steps = dict[str, tuple[Node, Ahead]]  # by the path of the step, for its output


class _Walk(Record):
    """How a body is run. steps: None if the steps are not listed; backwards: from the last token to the first."""

    steps: Steps | None
    exports: dict[int, Ahead]  # of the values that bodies export, so far
    backwards: bool = False
    blocks: dict[tuple[object, ...], Ahead] | None = None  # results of bodies that layers share; None to list all steps


def find(model: ModelSpec) -> Ahead | None:
    """Return the lookahead of a model's output (the largest of several), or None if it is not defined."""
    return max(of_outputs(model).values(), key=lambda ahead: ahead.tokens, default=None)


def of_outputs(model: ModelSpec) -> dict[str, Ahead]:
    """Return the lookahead of each output that is a sequence, by its name; a single unnamed output has the name "".

    Empty unless the input is a sequence.
    """
    results = model.graph.outputs or {"": model.graph.result}
    outputs = {name: value for name, value in results.items() if _has_tokens(model.types[value])}
    if not outputs or model.input.kind not in SEQUENCES:
        return {}
    known = _values(model.graph, _inputs(model), "", _Walk({}, {}, blocks={}))
    return {name: known[value] for name, value in outputs.items()}


def by_step(model: ModelSpec) -> dict[str, Ahead]:
    """Return the lookahead of each step whose output is a sequence, by the path of the step.

    Empty for image inputs, whose tokens have no order in time.
    """
    steps: Steps = {}
    if model.input.kind in SEQUENCES:
        _values(model.graph, _inputs(model), "", _Walk(steps, {}))
    return {path: ahead for path, (node, ahead) in steps.items() if _has_tokens(node.type)}


def latency(model: ModelSpec) -> int | None:
    """Return how many input tokens must arrive after a token before the output at its position can be computed.

    For a model that streams in frames it is the rest of the frame, otherwise the lookahead. None if an output depends
    on the whole sequence, or if the lookahead is not defined.
    """
    ahead = find(model)
    if ahead is None or ahead.tokens == WHOLE:
        return None
    return math.ceil(ahead.tokens) if graph.stream_obstacle(model) else graph.frame_size(model.graph) - 1


def latency_ms(model: ModelSpec) -> float | None:
    """Return the latency in milliseconds, or None if it is not defined or the input has no `sample_rate`."""
    tokens, rate = latency(model), model.input.sample_rate
    return None if tokens is None or not rate else 1000 * tokens / rate


def _has_tokens(wire: Wire | None) -> bool:
    return wire is not None and wire.kind in SEQUENCES and not wire.context


def _inputs(model: ModelSpec) -> dict[int, Ahead]:
    return {model.graph.input: Ahead(), **dict.fromkeys(model.graph.ports.values(), CONTEXT)}


def whole_tokens(tokens: Tokens) -> Tokens:
    """Return a number of tokens, rounded up: a part of one is a token split into several."""
    return tokens if tokens == WHOLE else math.ceil(tokens)


def _whole_frames(tokens: Tokens, frame: Rate) -> Tokens:
    """Return a number of tokens, rounded up to whole frames."""
    return tokens if tokens == WHOLE else -(-tokens // frame) * frame


def shown(tokens: Tokens) -> int | str:
    """Return a lookahead as a number or `all`."""
    return "all" if tokens == WHOLE else math.ceil(tokens)


def _run(body: Graph, known: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    """Return the lookahead of a body's result. `known`: that of outer values. Adds the nodes to the steps."""
    values = _values(body, known, path, walk)
    walk.exports.update((value, values[value]) for value in body.exports)
    return values[body.result]


def _values(body: Graph, known: dict[int, Ahead], path: str, walk: _Walk) -> dict[int, Ahead]:
    """Return the lookahead of all values of a body, including outer values that it reads."""
    known = dict(known)
    for node in body.nodes:
        name = graph.join(path, node.name)
        made = _node(node, known, name, walk)
        if walk.steps is not None:
            walk.steps[name] = node, made
        known |= dict.fromkeys(node.outputs, made)
        if node.exports:
            context = graph.is_context(node)
            known |= {value: CONTEXT if context else walk.exports[inside] for value, inside in node.exports.items()}
    return known


def _node(node: Node, known: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    if graph.is_context(node):
        return CONTEXT
    if isinstance(node, graph.OpNode):
        return _op(node, known, path, walk.backwards)
    if isinstance(node, graph.ScanNode):
        return _scan(node, known, path, walk)
    if isinstance(node, graph.EachNode):
        return _each(node, {inside: known[value] for value, inside in node.links}, path, walk)
    if isinstance(node, graph.ChooseNode):
        return _choose(node, known, path, walk)
    if isinstance(node, graph.RepeatNode):
        (result,) = (known[value] for value in node.at_ports)
        for label, body in node.bodies.items():
            result = _run(body, {**known, body.input: result}, graph.join(path, label), walk)
            known = {**known, **{value: walk.exports[value] for value in body.exports}}
        return result
    if isinstance(node, graph.BlockNode):
        return _block(node.bodies[""], {inside: known[value] for value, inside in node.links}, path, walk)
    if isinstance(node, graph.CellNode):
        return _cell(node, known, path, walk)
    results = [_run(body, known, graph.join(path, label), walk) for label, body in node.bodies.items()]
    read = node.at_ports if isinstance(node, graph.ResidualNode) else ()
    return _most([*(known[value] for value in read), *results])


def _block(body: Graph, inner: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    """Return the lookahead of a block: that of another layer with equal inputs, unless it names a step inside."""
    key = id(body), walk.backwards, *inner.items()
    if walk.blocks and key in walk.blocks:
        return walk.blocks[key]
    made = _run(body, inner, path, walk)
    if walk.blocks is not None and not body.exports and made.first in (None, *(each.first for each in inner.values())):
        walk.blocks[key] = made
    return made


def _cell(node: graph.CellNode, known: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    """Return the lookahead of a cell, which reads all earlier tokens: in reverse, all later ones."""
    body = node.bodies[""]
    most = _most([known[value] for value in node.reads])._replace(mixes=True)
    if walk.backwards:
        most = Ahead(1, WHOLE, most.first if most.tokens == WHOLE else (path, node), True, later=WHOLE)
    _run(body, {**known, body.input: most, **dict.fromkeys(body.ports.values(), most)}, path, walk)
    return most


def _choose(node: graph.ChooseNode, known: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    """Return the lookahead of a choose, whose steps may skip any number of tokens from one chosen token to the next."""
    body = node.bodies[""]
    most = _most([known[value] for value in node.reads])
    before = most._replace(mixes=False)
    inner = {inside: CONTEXT if known[value].context else before for value, inside in node.links}
    inside = _run(body, inner, path, walk)
    mixes = most.mixes or inside.mixes or not node.arguments.is_causal
    if node.arguments.is_causal and inside.bound <= before.bound:
        return most._replace(mixes=mixes)
    return Ahead(1, WHOLE, most.first if most.tokens == WHOLE else (path, node), mixes, later=WHOLE)


def _op(node: graph.OpNode, known: dict[int, Ahead], path: str, backwards: bool) -> Ahead:
    made = node.type.rate if node.type else 1
    if other_rate := node.other_rate:
        most, rate = _most(_complete(node, known)), made
    else:
        most = _most([known[value] for value in node.at_ports])
        rate = max([wire.rate for wire in node.wires if wire and not wire.context], default=1)
    reads_whole = any(not known[value].context for value in node.whole_inputs)
    if reads_whole or (backwards and (other_rate or made != rate)):  # windows in reverse may be others
        adds: Tokens = WHOLE
    else:
        adds = node.op.looks_back(*node.wires) if backwards else node.op.looks_ahead(*node.wires)
    mixes = most.mixes or node.op.reads != "token"
    if not adds and made == rate and mixes == most.mixes and most.frame % made == 0 and (most.tokens or not most.first):
        return most  # the usual case
    window, extra = most.window, most.extra
    if made > rate and adds == made - rate and (made % window == 0 or window % made == 0):
        window, extra = max(window, made), whole_tokens(extra)
    elif adds < 0 and adds % window == 0:  # windows still end together
        extra += adds
    elif adds:
        window, extra = 1, most.bound + adds
    past = adds if adds < 0 else max(adds - max(made - rate, 0), 0)  # the end of the op's own window
    later = most.later + _whole_frames(past, most.frame)  # a token past the end of a frame reads all of the next one
    found = Ahead(window, extra, most.first, mixes, frame=common_rate(most.frame, made), later=later)
    if not found.tokens:
        return found._replace(first=None)
    enters = found.tokens > most.tokens and (most.first is None or found.tokens == WHOLE)
    return found._replace(first=(path, node)) if enters else found


def _complete(node: graph.OpNode, known: dict[int, Ahead]) -> list[Ahead]:
    """Return the lookahead of what an op reads at another rate: a token sees only what is complete at its end."""
    assert node.type
    rate, found = node.type.rate, []
    for port, wire in zip(node.op.ports, node.wires, strict=True):
        for ahead in (known[value] for value in node.inputs.get(port.name, ())):
            if port.other_rate and wire and not ahead.context:
                if wire.rate % ahead.window == 0:  # it ends before the token that reads it does
                    window, extra = rate, ahead.extra + ahead.window - wire.rate
                elif ahead.window % rate and rate % ahead.window:
                    window, extra = 1, ahead.bound + rate - wire.rate
                else:
                    window, extra = max(ahead.window, rate), ahead.extra
                ahead = ahead._replace(window=window, extra=extra, frame=common_rate(ahead.frame, rate))
                ahead = ahead if ahead.tokens else ahead._replace(first=None)
            found.append(ahead)
    return found


def _scan(node: graph.ScanNode, known: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    body, orders = node.bodies[""], node.arguments.orders
    before = {value: ahead._replace(mixes=False) for value, ahead in known.items()}
    directions = {walk.backwards != order.endswith("reverse") for order in orders}
    listed = {walk.backwards} if walk.steps is not None else set()  # steps are listed in the order of the scan
    results = {
        backwards: _run(body, before, path, walk if backwards == walk.backwards else _Walk(None, {}, backwards))
        for backwards in sorted(directions | listed)
    }
    result, plain = _most([results[each] for each in directions]), results.get(walk.backwards)
    if result.mixes and result.tokens < WHOLE and any(map(graph.moves_tokens, orders)):
        result = Ahead(1, WHOLE, (path, node), later=WHOLE)
    outside = _most([known[v] for v in node.reads])
    if result.first and result.first != outside.first and not (plain and plain.tokens >= result.tokens):
        result = result._replace(first=(path, node))  # the scan turned earlier tokens into later ones
    mixes = any(known[v].mixes for v in node.reads) or any(each.mixes for each in results.values())
    return result._replace(mixes=mixes)


def _each(node: graph.EachNode, inner: dict[int, Ahead], path: str, walk: _Walk) -> Ahead:
    """Return the lookahead of an `each`, whose steps may read later tokens of their windows, rows or frames."""
    (body,), arguments, wire = node.bodies.values(), node.arguments, node.wires[0]
    assert wire
    if arguments.carries and not (walk.backwards and arguments.in_frames):
        return _run(body, inner, path, walk)
    read = _most([*inner.values()])
    inner = {number: ahead if ahead.context else read._replace(mixes=False) for number, ahead in inner.items()}
    inside = _run(body, inner, path, walk._replace(backwards=False))
    mixes, later = read.mixes or inside.mixes, inside.bound > read.bound
    whole_frame = node.type is not None and node.type.rate > wire.rate  # of which a vector is made
    if not (inside.mixes or later or whole_frame):
        return inside._replace(mixes=mixes)
    if walk.backwards or arguments.shift or (arguments.on_grid and later):
        return Ahead(1, WHOLE, (path, node), mixes, later=WHOLE)
    if not (later or whole_frame):
        return read._replace(mixes=mixes)
    span = wire.rate * arguments.width
    adds, window, extra = span - wire.rate, read.window, read.extra
    if span % window == 0 or window % span == 0:
        window = max(window, span)
    else:
        window, extra = 1, read.bound + adds
    found = Ahead(window, extra, read.first, True, frame=common_rate(read.frame, span), later=read.later)
    return found._replace(first=(path, node)) if found.tokens > read.tokens and read.first is None else found


def _most(read: list[Ahead]) -> Ahead:
    """Return the lookahead of a value that depends on all of these: the largest, mixed if any of them is."""
    read = list(dict.fromkeys(ahead for ahead in read if not ahead.context))
    if len(read) == 1:
        return read[0]
    most = max(read, key=lambda ahead: ahead.bound, default=Ahead())
    mixes = any(ahead.mixes for ahead in read)
    window = max((ahead.window for ahead in read), default=1)
    extra = max((ahead.extra for ahead in read), default=0.0)
    apart = any(window % ahead.window for ahead in read)  # whether windows do not end together
    if apart or window + extra > max((ahead.window + ahead.extra for ahead in read), default=1):
        window, extra = 1, most.bound
    frame, later = common_rate(1, *(ahead.frame for ahead in read)), max((ahead.later for ahead in read), default=0)
    return Ahead(window, extra, most.first, mixes, frame=frame, later=later)
