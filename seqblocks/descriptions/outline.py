"""Format the typed spec as text or data: blocks with their arguments, names and steps, before the analysis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seqblocks.language.arguments import Argument
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, plain
from seqblocks.language.spec import Block, SpecFile

PARTS = ("expect", "checkpoint", "init")


def data(file: SpecFile) -> dict[str, Any]:
    """Return the typed spec as plain data. An argument without a `default` is required."""
    lists = {key: _plain(file.root.get(key)) or [] for key in ("needs", "use")}
    found: dict[str, Any] = {"about": file.about, **lists, "let": _plain(file.let)}
    found["blocks"] = {
        block.name: {
            "about": block.about,
            "arguments": {
                a.name: {"type": a.type} | ({} if a.default is None else {"default": plain(a.default)})
                for a in block.args.values()
            },
            "let": _plain(block.let),
            "steps": _plain(block.steps),
            "checkpoint": _plain(block.checkpoint),
            "init": _plain(block.init),
        }
        for block in file.blocks.values()
    }
    return found | {key: _plain(file.root.get(key)) for key in ("model", *PARTS)}


def text(file: SpecFile, name: str) -> str:
    """Return the typed spec as text, one line per name, argument and step (`seqblocks show --stage spec`)."""
    lines = [f"{name}: {file.about}" if file.about else name]
    for key in ("needs", "use"):
        names = file.root.get(key)
        lines += [f"{key.removesuffix('s')}s {_inline(names)}"] if names is not None else []
    lines += _table("let", file.let, "")
    for block in file.blocks.values():
        lines += ["", *_block(block)]
    if file.model is not None:
        lines += ["", "model", *(f"  {key}: {_inline(value)}" for key, _, value in file.model if key != "steps")]
        lines += _steps("steps", file.model.get("steps"), "  ")
    for part in PARTS:
        lines += _table(part, getattr(file, part), "")
    return "\n".join(lines)


def _block(block: Block) -> Iterator[str]:
    yield f"block {block.name}" + (f": {block.about}" if block.about else "")
    if block.args:
        yield "  arguments"
        width = max(map(len, block.args))
        yield from (f"    {a.name:<{width}}  {_argument(a)}" for a in block.args.values())
    yield from _table("let", block.let, "  ")
    yield from _steps("steps", block.steps, "  ")
    yield from _table("checkpoint", block.checkpoint, "  ")
    yield from _table("init", block.init, "  ")


def _argument(argument: Argument) -> str:
    text = f"{argument.type}, " + ("required" if argument.default is None else f"default {_inline(argument.default)}")
    return f"{text}: {meaning}" if (meaning := argument.meaning()) else text


def _table(title: str, mapping: Mapping | None, pad: str) -> Iterator[str]:
    if mapping is not None and mapping.entries:
        yield f"{pad}{title}"
        yield from (f"{pad}  {key}: {_inline(value)}" for key, _, value in mapping)


def _steps(title: str, node: Node | None, pad: str) -> Iterator[str]:
    """Yield a list of steps below its key; nested steps are indented further."""
    if not isinstance(node, Sequence):
        if node is not None:
            yield f"{pad}{title}: {_inline(node)}"
        return
    yield f"{pad}{title}"
    for item in node.items:
        yield from _step(item, pad + "  ")


def _step(node: Node, pad: str) -> Iterator[str]:
    if not (isinstance(node, Mapping) and len(node.entries) == 1):
        yield pad + _inline(node)
        return
    ((verb, _, value),) = node
    if isinstance(value, Mapping):
        inner = {key: each for key, _, each in value if _holds_steps(key, each)}
        words = [f"{key}: {_inline(each)}" for key, _, each in value if key not in inner]
        yield f"{pad}{verb}" + (f"  {', '.join(words)}" if words else "")
        for key, each in inner.items():
            yield from _steps(key, each, pad + "  ")
    elif _holds_steps(verb, value):
        yield from _steps(verb, value, pad)
    else:
        yield f"{pad}{verb}: {_inline(value)}"


def _holds_steps(key: str, value: Node) -> bool:
    return isinstance(value, Sequence) and (key == "steps" or any(isinstance(item, Mapping) for item in value.items))


def _inline(node: Node) -> str:
    match node:
        case Mapping():
            return "{" + ", ".join(f"{key}: {_inline(value)}" for key, _, value in node) + "}"
        case Sequence():
            return "[" + ", ".join(map(_inline, node.items)) + "]"
        case Scalar():
            return node.text or "''"
    raise AssertionError(node)


def _plain(node: Node | None) -> Any:
    return None if node is None else plain(node)
