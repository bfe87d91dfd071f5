"""Lower `repeat`: layers of steps, all alike or chosen by the words of a pattern, each with separate parameters."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context, Layers
from seqblocks.analysis.scope.layer_wires import check_missed
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import argument
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators import MAX_REPEATS
from seqblocks.combinators.repeat import Repeat, read_pattern
from seqblocks.errors import Fault, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, plain
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.keys import is_name
from seqblocks.op import fields_of
from seqblocks.suggestions import did_you_mean

Layer = tuple[str, Node]


def _scope(ctx: Context, step: Step) -> Names:
    """Return the names inside a repeat whose layers are unknown, and report unknown keys."""
    node, words = step.get("index"), _words(step)
    if "pattern" not in step.fields:
        _check_words(ctx, step, None, words, set())
    index = "layer" if node is None else argument(ctx, node, fields_of(Repeat)["index"])
    others = [each.text for each in words.values() if isinstance(each, Scalar)]  # of a misspelt `index`
    names = Names(ctx.names, {name: UNKNOWN for each in (index, *others) for name in (each, f"{each}s")})
    names.is_of_repeat = True
    names.incomplete = not (isinstance(index, str) and index.isidentifier())
    return names


def _words(step: Step) -> dict[str, Node]:
    """Return the keys that are words of a pattern, or unknown."""
    return {key: node for key, (_, node) in step.fields.items() if key not in Repeat.model_fields}


@combines(Repeat, scope=_scope)
def lower_repeat(ctx: Context, step: Step, arguments: Repeat, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if the pattern is invalid (E601, E602, E604), or `steps` is missing (E202)."""
    words = _words(step)
    pattern = [] if arguments.pattern is None else read_pattern(arguments.pattern, words)
    _check_words(ctx, step, arguments.pattern, words, set(pattern))
    if "index" in step.fields and not is_name(ctx.run.report, arguments.index, step.fields["index"][1].span):
        return None
    if step.incomplete and not _is_complete(arguments, words, pattern):
        return None
    layers = _layers(arguments, words, pattern)
    bodies: dict[str, graph.Graph] = {}
    value = x
    above = Layers(len(layers), x, place=step.name_span)
    inside = ctx._replace(layers=UNKNOWN if ctx.layers is UNKNOWN else ctx.layers * len(layers))
    for index, (_, steps) in enumerate(layers):
        if ctx.run.full:  # already reported
            return None
        names = Names(ctx.names, {arguments.index: index, f"{arguments.index}s": len(layers)})
        names.is_of_repeat = True
        body = lower_inside(inside, steps, value, str(index), names=names, layers={f"{arguments.index}s": above})
        bodies[str(index)], value = body, body.result
        above.scopes.append(ctx.body.inner[-1])
        above.bodies.append(body)
    if above.missed:
        check_missed(above)
    node = make_node(ctx, step, graph.RepeatNode, {"x": (x,)}, ctx.run.types[value], bodies=bodies, arguments=arguments)
    if arguments.share != "none":
        _share(ctx, step, node, layers, arguments.share)
    ctx.body.layers[node.name] = above._replace(node=node, missed={})
    return node


def _share(ctx: Context, step: Step, node: graph.Node, layers: list[Layer], share: str | list[str]) -> None:
    """Share the parameters of the first layer of each word, or those of another step, with the layers."""
    from seqblocks.analysis.steps.sharing import share_layers, share_parameters  # few specs need it

    if isinstance(share, str) and share != "all":
        share_parameters(ctx, step, node, share)
        return
    firsts: dict[str, str] = {}
    labels = {str(index): firsts.setdefault(word, str(index)) for index, (word, _) in enumerate(layers)}
    try:
        share_layers(ctx, step, node, labels, share if isinstance(share, list) else None)
    except Fault as fault:
        ctx.report(fault, step)


def _check_words(ctx: Context, step: Step, pattern: str | None, words: dict[str, Node], used: set[str]) -> None:
    """Report words that the pattern does not use, or unknown keys if there is no pattern."""
    node = step.get("pattern")
    chosen = node is not None and (node.span.source.is_override or plain(node) != pattern)
    if not pattern:  # the other keys may be words of a misspelt pattern
        words = {word: node for word, node in words.items() if did_you_mean(word, ("pattern",))} or words
    for word, steps in words.items():
        if word not in used and not (chosen and pattern):
            kinds = [each for each in steps.entries if each in used] if isinstance(steps, Mapping) else []
            fault = (
                _not_in_pattern(word, pattern, used, kinds) if pattern
                else _unknown_key(word, isinstance(steps, Sequence))
            )  # fmt: skip
            ctx.report(fault, step.key_span(word))
            step.incomplete = True


def _not_in_pattern(word: str, pattern: str, words: set[str], kinds: list[str]) -> Fault:
    """Return the fault of a key. kinds: words of the pattern in its value, which belong beside it."""

    def hint() -> str | None:
        return f"write `{kinds[0]}:` beside `pattern:`, without {quote(word)}" if kinds else did_you_mean(word, words)

    return Fault("E603", f"{quote(word)} is not in the pattern", found=pattern, hint=hint)


def _unknown_key(key: str, holds_steps: bool) -> Fault:
    known = ("times", "steps", "pattern", "index", "share", "name", "from", "as", "when")

    def hint() -> str | None:
        a_kind_of_layer = f"if {key} is a kind of layer, add a pattern, such as `pattern: {key}*6`"
        return did_you_mean(key, known) or (a_kind_of_layer if holds_steps else None)

    return Fault("E201", f"unknown key {quote(key)} in repeat", hint=hint)


def _is_complete(arguments: Repeat, words: dict[str, Node], pattern: list[str]) -> bool:
    """Return whether the steps of all layers are known."""
    if arguments.pattern is None:
        return arguments.steps is not None
    return all(word in words for word in pattern)


def _layers(arguments: Repeat, words: dict[str, Node], pattern: list[str]) -> list[Layer]:
    """Return the word and the steps of each layer."""
    if arguments.pattern is None:
        if arguments.steps is None:
            raise Fault("E202", "repeat takes either `steps` or `pattern`", hint="times: 12 with steps: […]")
        return [("steps", arguments.steps)] * arguments.times
    if arguments.steps is not None:
        hint = "use `times` and `steps`, or a pattern and the steps of each of its words: m: […]"
        raise Fault("E210", "repeat takes either `steps` or `pattern`", at="steps", hint=hint)
    layers: list[Layer] = []
    for word in pattern:
        if word not in words:
            raise Fault(
                "E602",
                f"the pattern's word {quote(word)} has no steps",
                at="pattern",
                expected=f"one of {listing(words)}" if words else "a key that holds its steps",
                hint=did_you_mean(word, words) or f"add `{word}: [steps]` next to the pattern",
            )
        layers.append((word, words[word]))
    if len(layers) * arguments.times > MAX_REPEATS:
        raise Fault("E604", "too many layers", at="pattern", expected=f"at most {MAX_REPEATS}")
    return layers * arguments.times

