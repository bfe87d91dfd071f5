"""Verbs that tell about the language and about specs: list, ops, show, schema."""

from __future__ import annotations

import argparse
from typing import Any

from seqblocks import check, graph
from seqblocks.cli import output
from seqblocks.errors import UsageError, did_you_mean
from seqblocks.spec import bundled


def list(options: argparse.Namespace) -> int:
    """Bundled specs, models first."""
    rows: dict[str, dict[str, dict[str, Any]]] = {"models": {}, "blocks": {}}
    for name in bundled():
        file, model = check.load(name)
        if model:
            rows["models"][name] = {"params": graph.count(model.graph), "about": file.about}
        else:
            rows["blocks"][name] = {"verbs": [*file.blocks], "about": file.about}
    if options.format == "json":
        output.dump(rows)
        return 0
    width = max(map(len, bundled()))
    output.write("models (seqblocks build NAME)")
    for name, row in sorted(rows["models"].items(), key=lambda item: item[1]["params"]):
        output.write(f"  {name:<{width}}  {row['params']:>13,}  {row['about']}")
    output.write("blocks (use: [NAME])")
    for name, row in rows["blocks"].items():
        output.write(f"  {name:<{width}}  {', '.join(row['verbs'])}: {row['about']}")
    return 0


def ops(options: argparse.Namespace) -> int:
    """All verbs, or one in full."""
    from seqblocks import reference

    verbs = reference.verbs()
    if options.name is None:
        if options.format == "json":
            output.dump({name: reference.facts(verb) for name, verb in verbs.items()})
            return 0
        width = max(map(len, verbs))
        for name, verb in verbs.items():
            output.write(f"  {name:<{width}}  {reference.facts(verb)['about'].splitlines()[0]}")
        return 0
    block = None if options.name in verbs else _block(options.name)
    if block:
        output.dump(block) if options.format == "json" else output.write(_told(block))
        return 0
    if options.name not in verbs:
        blocks = [n for s, p in bundled().items() if p.parent.name == "blocks" for n in check.load(s)[0].blocks]
        lists = "`seqblocks ops` lists them, `seqblocks list` the bundled blocks"
        hint = did_you_mean(options.name, [*verbs, *blocks]) or lists
        raise UsageError(f"there is no verb '{options.name}': {hint}")
    verb = verbs[options.name]
    if options.format == "json":
        output.dump(reference.facts(verb))
    else:
        output.write(reference.text(verb))
    return 0


def _block(name: str) -> dict[str, Any] | None:
    """What is to be known of a bundled block; None if no bundled file has it."""
    from seqblocks import document

    for source, path in bundled().items():
        if path.parent.name == "blocks":
            found = check.load(source)[0].blocks.get(name)
            if found:
                defaults = {a.name: a.default and document.plain(a.default) for a in found.args.values()}
                arguments = [{"name": a.name, "type": a.type, "default": defaults[a.name]} for a in found.args.values()]
                return {"name": name, "use": source, "about": found.about, "arguments": arguments}
    return None


def _told(block: dict[str, Any]) -> str:
    lines = [f"{block['name']}: {block['about']}", "", f"a block; the spec says  use: [{block['use']}]"]
    if block["arguments"]:
        lines += ["", "arguments:"]
        width = max(len(a["name"]) for a in block["arguments"])
        for a in block["arguments"]:
            default = "required" if a["default"] is None else f"default {a['default']}"
            lines.append(f"  {a['name']:<{width}}  {a['type']}, {default}")
    return "\n".join(lines)


def show(options: argparse.Namespace) -> int:
    """A spec at one stage of its way."""
    from seqblocks import document
    from seqblocks.cli.check import load

    file, model = load(options.spec, options)
    if options.stage == "document":
        output.write(document.show(file.root))
        return 0
    output.write(graph.show(check.require_model(file, model)))
    return 0


def schema(options: argparse.Namespace) -> int:
    """The JSON schema of the language."""
    from seqblocks import schema as room

    file = None
    if options.spec:
        file, _ = check.load(options.spec)
    output.dump(room.schema(file))
    return 0
