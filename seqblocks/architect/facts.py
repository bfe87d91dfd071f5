"""Measure a design: parameters, cost, state, lookahead. The figures are those of `seqblocks.summarise`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.passes import lookahead
from seqblocks.cost import count_state, input_macs, item_bytes, longest, macs, params_bytes, state_bytes, tokens_of
from seqblocks.descriptions.numbers import bytes_of, count, short
from seqblocks.errors import UsageError, quote
from seqblocks.graph import Graph, ModelSpec
from seqblocks.suggestions import did_you_mean

EMBEDDINGS = frozenset({"embed", "unembed", "position_embed"})  # verbs whose tables the literature leaves out
Value = Any  # int, float, str, bool, or None if it is unknown
Measure = Callable[[ModelSpec, str, "int | None"], Value]  # of a model, in a dtype, at a number of tokens


class Fact(NamedTuple):
    """A figure of a model. at_length: whether it depends on the number of tokens of a sequence."""

    title: str
    measure: Measure
    show: Callable[[Any], str] = count
    at_length: bool = False


def _tokens(model: ModelSpec, length: int | None) -> int | None:
    return tokens_of(model) or length


def non_embedding(body: Graph) -> int:
    """Return the number of parameters outside the tables of tokens and positions: `embed`, `unembed`,
    `position_embed`."""
    own = (item for item in graph.parameters(body) if item.tied is None and item.node.verb not in EMBEDDINGS)
    return sum(item.parameter.numel for item in own)


def kv_bytes_per_token(body: Graph, dtype: str) -> float:
    """Return the bytes that one more token adds to the caches of attention without a window, for one sequence.

    The total state (`state_bytes`) has these caches at their full size.
    """
    total = 0.0
    for node in graph.walk(body):
        caches = [state for state in node.state.values() if state.per_token]
        rate = float(node.state_rate) if isinstance(node, graph.OpNode) else 1
        tokens = len(node.type.lanes) if node.type else 0  # the axis of the tokens, after the sequences of `each`
        sizes = ((state.numel // state.shape[tokens], state.dtype) for state in caches)
        total += sum(count * item_bytes(kind, dtype) for count, kind in sizes) / rate
    return int(total) if total.is_integer() else total


def _ahead(model: ModelSpec, dtype: str, length: int | None) -> Value:
    found = lookahead.find(model)
    return None if found is None else lookahead.shown(found.tokens)


def _streams(model: ModelSpec, dtype: str, length: int | None) -> Value:
    return graph.stream_obstacle(model) is None


def _flops(model: ModelSpec, dtype: str, length: int | None) -> Value:
    found = macs(model.graph, _tokens(model, length))
    return None if found is None else 2 * found


def _any(value: Any) -> str:
    return count(value) if isinstance(value, int) else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


FACTS: dict[str, Fact] = {
    "params": Fact("parameters", lambda model, dtype, length: graph.count(model.graph)),
    "active_params": Fact(
        "active per token", lambda model, dtype, length: graph.count(model.graph, active=True)
    ),
    "non_embedding_params": Fact("non-embedding", lambda model, dtype, length: non_embedding(model.graph)),
    "params_bytes": Fact("size", lambda model, dtype, length: params_bytes(model.graph, dtype), bytes_of),
    "macs_per_token": Fact(
        "MACs/token", lambda model, dtype, length: macs(model.graph, _tokens(model, length)), count, at_length=True
    ),
    "flops_per_token": Fact("FLOPs/token", _flops, count, at_length=True),
    "input_macs": Fact(
        "MACs/input", lambda model, dtype, length: input_macs(model.graph, _tokens(model, length)), short,
        at_length=True,
    ),
    "state": Fact("state", lambda model, dtype, length: count_state(model.graph)),
    "state_bytes": Fact("state size", lambda model, dtype, length: state_bytes(model.graph, dtype), bytes_of),
    "kv_bytes_per_token": Fact(
        "KV cache/token", lambda model, dtype, length: kv_bytes_per_token(model.graph, dtype), bytes_of
    ),
    "lookahead": Fact("lookahead", _ahead, _any),
    "latency": Fact("latency", lambda model, dtype, length: lookahead.latency(model), count),
    "streams": Fact("streams", _streams, _yes),
}  # fmt: skip


def fact(name: str, only: Iterable[str] = FACTS) -> Fact:
    """Return a fact by its name. Raises UsageError for an unknown one."""
    known = [*only]
    if name not in known:
        hint = did_you_mean(name, known) or f"one of {', '.join(known)}"
        raise UsageError(f"there is no fact {quote(name)}: {hint}")
    return FACTS[name]


def measure(model: ModelSpec, name: str, dtype: str = "float32", length: int | None = None) -> Value:
    """Return one fact of a model. None: unknown, or the model does not take sequences of `length` tokens."""
    if FACTS[name].at_length and length and not _takes(model, length):
        return None
    return FACTS[name].measure(model, dtype, length)


def _takes(model: ModelSpec, length: int) -> bool:
    fixed = tokens_of(model)
    return length == fixed if fixed else length % graph.frame_size(model.graph) == 0 and length <= longest(model.graph)


def shown(name: str, value: Value) -> str:
    """Return a fact as text."""
    return "-" if value is None else FACTS[name].show(value)
