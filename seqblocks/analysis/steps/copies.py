"""Find bodies of a block that differ only in initial values, as in layers whose `init:` depends on their number.

The first one is lowered, and the others are copies of it with their own initial values. See docs/decisions/0046.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.conditions import condition
from seqblocks.language import document
from seqblocks.language.document import Node, Scalar, Sequence
from seqblocks.language.spec import Block
from seqblocks.op import Op
from seqblocks.record import Record


class Original(Record):
    """A lowered body of a block, which may be copied."""

    ctx: Context  # inside it
    body: graph.Graph
    values: Mapping[str, Any]  # the arguments of the block, except wires and steps
    types: tuple[Any, ...]  # of the wires that the block reads
    steps: int  # including those in nested bodies
    height: int  # of nested bodies below the one that uses the block


class Free(Record):
    """The arguments of a block that determine initial values, perhaps whether a step is present, and nothing else."""

    names: frozenset[str]
    initial: frozenset[str]  # those of them that determine no condition
    let: frozenset[str]  # entries of its `let:` that depend on these
    steps: tuple[Step, ...]  # those whose initial values, or those of steps inside them, depend on these
    conditions: tuple[Step, ...]  # those whose condition does


NOTHING = Free(frozenset(), frozenset(), frozenset(), (), ())


def keep(run: Run, block: Block, original: Original) -> None:
    """Remember a body without faults, unless its parameters are those of other steps."""
    if _is_alone(run, original.body):
        run.alone[id(original.body)] = original.body
        found = run.originals.setdefault(id(block), {})
        names = free(run, block) if found else NOTHING
        found[_key(block, names, original.ctx, original.values, original.types) if found else None] = original


def _is_alone(run: Run, body: graph.Graph) -> bool:
    """Return whether all steps are known and have parameters of their own."""
    for node in body.nodes:
        if node.type is None or node.owner or node.ties:
            return False
        for inner in node.bodies.values():
            if not (id(inner) in run.alone if isinstance(node, graph.BlockNode) else _is_alone(run, inner)):
                return False
    return True


def find(ctx: Context, block: Block, values: Mapping[str, Any], types: tuple[Any, ...]) -> Original | None:
    """Return a body of the block that differs only in initial values from the one for these arguments, if any.

    ctx: the context inside the block, with these arguments.
    """
    run = ctx.run
    found = run.originals.get(id(block), {})
    if not found:
        return None
    names = free(run, block)
    if None in found:  # the first one, whose key is computed only when a second appears
        first = found.pop(None)
        found[_key(block, names, first.ctx, first.values, first.types)] = first
    return found.get(_key(block, names, ctx, values, types))


def keep_faulty(run: Run, block: Block, original: Original) -> None:
    """Remember a body with faults."""
    found = run.faulty.setdefault(id(block), {})  # before its key, which depends on the steps of the first
    if not found:
        found[None] = original
    found[_place(original.ctx, block, original.values, original.types)] = original


def find_faulty(ctx: Context, block: Block, values: Mapping[str, Any], types: tuple[Any, ...]) -> Original | None:
    """Return a body whose faults are also those for these arguments in this place: only initial values may differ."""
    found = ctx.run.faulty.get(id(block))
    return found.get(_place(ctx, block, values, types)) if found else None


def _place(ctx: Context, block: Block, values: Mapping[str, Any], types: tuple[Any, ...]) -> Any:
    """Return everything that faults in a body and their causes depend on, apart from its initial values."""
    spans = [note.span for note in ctx.trail if note.span]
    trail = tuple((span.source.name, span.line, span.column) for span in spans)
    passed = tuple(each.key for each in ctx.passed.values())
    return trail, passed, _key(block, free(ctx.run, block), ctx, values, types)


def _key(block: Block, names: Free, ctx: Context, values: Mapping[str, Any], types: tuple[Any, ...]) -> Any:
    """Return everything that a body depends on, apart from its initial values."""
    fixed = {name: value for name, value in values.items() if name not in names.names}
    layers = ctx.layers if id(block) in ctx.run.by_depth else None
    return repr(fixed), tuple(condition(ctx, step) for step in names.conditions), types, layers


# --- what only initial values depend on -------------------------------------------------------------------------------


def free(run: Run, block: Block) -> Free:
    """Return what only initial values depend on in a block, according to the words in its steps.

    Steps inside the combinators of the block count as a whole, with their initial values.
    """
    if id(block) not in run.free:
        first = next(iter((run.originals.get(id(block)) or run.faulty.get(id(block), {})).values()), None)
        by_steps = any(each.type == "steps" for each in block.args.values())
        run.free[id(block)] = _free(run, block, first.ctx.body.steps) if first and not by_steps else NOTHING
    found: Free = run.free[id(block)]
    return found


def _free(run: Run, block: Block, steps: list[Step]) -> Free:
    initial: list[tuple[Step, Node]] = []
    whens: list[tuple[Step, Node]] = []
    others: list[Node] = [block.checkpoint] if block.checkpoint else []
    for step in steps:
        for key, (_, node) in (*step.fields.items(), *step.common.items()):
            if _is_initial(run, step, key):
                initial.append((step, node))
            elif key == "when" and key in step.common:
                whens.append((step, node))
            else:
                others.append(node)
    uses = {name: words_in([node]) for name, _, node in block.let or ()}
    fixed = _reached(words_in(others), uses)
    names = frozenset(name for name, each in block.args.items() if each.type != "wire" and name not in fixed)
    users: dict[str, set[str]] = {}
    for name, words in uses.items():
        for word in words:
            users.setdefault(word, set()).add(name)
    dependent = _reached(names, users)
    let = frozenset(name for name in uses if name in dependent)
    initial_names = names - _reached(words_in([node for _, node in whens]), uses)
    return Free(names, initial_names, let, _reading(initial, dependent), _reading(whens, dependent))


def _reading(values: list[tuple[Step, Node]], names: set[str]) -> tuple[Step, ...]:
    """Return the steps with a value that contains one of the names."""
    return tuple(dict.fromkeys(step for step, node in values if not names.isdisjoint(words_in([node]))))


def _is_initial(run: Run, step: Step, key: str) -> bool:
    """Return whether nothing but initial values depends on this argument of a step."""
    meaning = step.found.meaning if step.found else None
    if isinstance(meaning, Block):
        return key in step.fields and key in free(run, meaning).initial
    return key == "init" and key in step.common and isinstance(meaning, type) and issubclass(meaning, Op)


def _reached(start: Iterable[str], edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the words that can be reached from some, which they include."""
    found = set(start)
    waiting = list(found)
    while waiting:
        new = set(edges.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def words_in(nodes: Iterable[Node]) -> set[str]:
    """Return all words in nodes, a superset of the names that they use."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        match waiting.pop():
            case Scalar(value=str(text)):
                found.update(re.findall(r"[^\W\d]\w*", text if text.isascii() else _normalised(text)))
            case Sequence(items=items):
                waiting += items
            case document.Mapping(entries=entries):
                found.update(entries)
                waiting += (node for _, node in entries.values())
    return found


def _normalised(text: str) -> str:
    """Return a text with its names as Python's parser reads them: one in fullwidth letters is the same name."""
    from unicodedata import normalize

    return normalize("NFKC", text)
