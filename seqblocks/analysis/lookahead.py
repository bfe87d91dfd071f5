"""How far each value of a graph looks ahead: how many later tokens of the model's input a position may depend on.

A token of a wire at rate r (`Wire.rate`) has the position of the first input token that it is made of, r * j. One rule
for each verb: a position depends on what it reads, and an op adds what `Op.looks_ahead` says. An op that makes one
token of several reads whole windows; windows in windows end together, so they add nothing to one another. A scan in
another order turns the tokens around: what was before a token then follows it, up to the end of the sequence.
The tokens are those of the input that streams. What depends on the other inputs alone looks at none of them; a vector
made of the whole sequence, where it meets each of its tokens, looks at all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from seqblocks import graph
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.types import Wire

WHOLE = math.inf  # the whole sequence
SEQUENCES = ("sequence", "tokens")


class Ahead(NamedTuple):
    """Of a value: a position sees the rest of its window of `window` input tokens, and `beyond` tokens more.

    Nor does it see more than the rest of a frame of `frame` tokens, which holds whole windows of all sizes so far, and
    `later` tokens more: the smaller bound where windows do not end together.

    `first` is the step by which the future enters, or by which it becomes the whole sequence. `mixes`: whether the
    value depends on other tokens of what the scan around was given, before or after. `context`: whether it depends on
    no token at all.
    """

    window: int = 1
    beyond: float = 0
    first: tuple[str, Node] | None = None  # its path, and the step
    mixes: bool = False
    context: bool = False
    frame: int = 1
    later: float = 0

    @property
    def tokens(self) -> float:
        """How many later tokens it may depend on."""
        return min(self.window - 1 + self.beyond, self.frame - 1 + self.later)


CONTEXT = Ahead(context=True)

Steps = dict[str, tuple[Node, Ahead]]  # by the path of the step; Ahead is of its output


def find(model: ModelSpec) -> Ahead | None:
    """Return the lookahead of a model's output, of several the farthest; None where it has no meaning."""
    return max(of_outputs(model).values(), key=lambda ahead: ahead.tokens, default=None)


def of_outputs(model: ModelSpec) -> dict[int, Ahead]:
    """Return the lookahead of each output by its value: of those that are sequences, if a sequence streams in."""
    outputs = [value for value in model.graph.results if _has_tokens(model.types[value])]
    if not outputs or model.input.kind not in SEQUENCES:
        return {}
    known = _values(model.graph, _inputs(model), "", {})
    return {value: known[value] for value in outputs}


def by_step(model: ModelSpec) -> dict[str, Ahead]:
    """Return the lookahead of each step's output by the step's path, outputs that are sequences only.

    Empty where an image comes in, whose tokens have no order in time.
    """
    steps: Steps = {}
    if model.input.kind in SEQUENCES:
        _values(model.graph, _inputs(model), "", steps)
    return {path: ahead for path, (node, ahead) in steps.items() if _has_tokens(node.type)}


def latency(model: ModelSpec) -> int | None:
    """Return how many input tokens must arrive after a token before the output at its position can be computed.

    A model that streams takes frames, so that is the rest of the frame; for another one it is the lookahead. None where
    an output depends on the whole sequence, or a lookahead has no meaning.
    """
    ahead = find(model)
    if ahead is None or ahead.tokens == WHOLE:
        return None
    return int(ahead.tokens) if graph.stream_obstacle(model) else graph.frame_size(model.graph) - 1


def latency_ms(model: ModelSpec) -> float | None:
    """Return the latency in milliseconds; None where there is none, or the input has no `sample_rate`."""
    tokens, rate = latency(model), model.input.sample_rate
    return None if tokens is None or not rate else 1000 * tokens / rate


def _has_tokens(wire: Wire | None) -> bool:
    return wire is not None and wire.kind in SEQUENCES and not wire.context


def _inputs(model: ModelSpec) -> dict[int, Ahead]:
    return {model.graph.input: Ahead(), **dict.fromkeys(model.graph.ports.values(), CONTEXT)}


def shown(tokens: float) -> int | str:
    """As a number, or `all`."""
    return "all" if tokens == WHOLE else int(tokens)


def _run(body: Graph, known: dict[int, Ahead], path: str, steps: Steps) -> Ahead:
    """Of a body's result, where `known` holds the values that it reads from outside. Enters its nodes in `steps`."""
    return _values(body, known, path, steps)[body.result]


def _values(body: Graph, known: dict[int, Ahead], path: str, steps: Steps) -> dict[int, Ahead]:
    """Of all values of a body and those that it reads from outside."""
    known = dict(known)
    for node in body.nodes:
        name = graph.join(path, node.name)
        made = _node(node, known, name, steps)
        steps[name] = node, made
        known |= dict.fromkeys(node.outputs, made)
    return known


def _node(node: Node, known: dict[int, Ahead], path: str, steps: Steps) -> Ahead:
    if graph.is_context(node):
        return CONTEXT
    read = [known[v] for values in node.inputs.values() for v in values]
    if node.op is not None:
        return _op(node, read, path, any(not known[v].context for v in node.whole_inputs))
    if node.kind == "scan":
        return _scan(node, known, path, steps)
    if node.kind == "repeat":
        (result,) = read
        for label, body in node.bodies.items():
            result = _run(body, {**known, body.input: result}, graph.join(path, label), steps)
        return result
    if node.kind == "block":  # its body is closed, with values of its own for what it is handed
        body = node.bodies[""]
        handed = {port: known[v] for port, (v,) in node.inputs.items()}
        inside = {number: handed[port] for port, number in body.ports.items()}
        return _run(body, {body.input: handed["x"], **inside}, path, steps)
    results = [_run(body, known, graph.join(path, label), steps) for label, body in node.bodies.items()]
    return _most([*(read if node.kind == "residual" else []), *results])


def _op(node: Node, read: list[Ahead], path: str, reads_whole: bool) -> Ahead:
    """reads_whole: whether each token reads all of the sequence, or a vector made of it."""
    assert node.op is not None
    most = _most(read)
    adds = WHOLE if reads_whole else node.op.looks_ahead(*node.wires)
    rate = max((wire.rate for wire in node.wires if wire and not wire.context), default=1)
    made = node.type.rate if node.type else 1
    window, beyond = most.window, most.beyond
    if made > rate and adds == made - rate and (made % window == 0 or window % made == 0):
        window = max(window, made)
    elif adds:
        window, beyond = 1, most.tokens + adds
    frame, later = math.lcm(most.frame, made), most.later + max(adds - max(made - rate, 0), 0)
    mixes = most.mixes or node.op.reads != "token"
    found = Ahead(window, beyond, most.first, mixes, frame=frame, later=later)
    enters = found.tokens > most.tokens and (most.first is None or found.tokens == WHOLE)
    return found._replace(first=(path, node)) if enters else found


def _scan(node: Node, known: dict[int, Ahead], path: str, steps: Steps) -> Ahead:
    body = node.bodies[""]
    before = {value: ahead._replace(mixes=False) for value, ahead in known.items()}
    result = _run(body, before, path, steps)
    outside = any(known[v].mixes for v in node.reads)
    in_order = all(order in ("forward", "rows") for order in node.arguments.orders)
    if result.mixes and not in_order and result.tokens < WHOLE:
        result = Ahead(1, WHOLE, (path, node), later=WHOLE)
    return result._replace(mixes=result.mixes or outside)


def _most(read: list[Ahead]) -> Ahead:
    """What depends on all of these: the farthest, the first of several; mixed if any is."""
    read = [ahead for ahead in read if not ahead.context]
    most = max(read, key=lambda ahead: ahead.tokens, default=Ahead())
    mixes = any(ahead.mixes for ahead in read)
    window = max((ahead.window for ahead in read), default=1)
    beyond = max((ahead.beyond for ahead in read), default=0.0)
    if any(window % ahead.window for ahead in read):  # windows that do not end together
        window, beyond = 1, most.tokens
    frame, later = math.lcm(*(ahead.frame for ahead in read)), max((ahead.later for ahead in read), default=0)
    return Ahead(window, beyond, most.first, mixes, frame=frame, later=later)
