"""Verbs that describe the language and specs: list, ops, show, schema."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from seqblocks import graph, op
from seqblocks._version import __version__
from seqblocks.analysis import check
from seqblocks.cli import output
from seqblocks.errors import UsageError, listing, quote, visible
from seqblocks.graph import ModelSpec
from seqblocks.language.overrides import as_text
from seqblocks.language.spec import Block, SpecFile
from seqblocks.language.spec_files import bundled, looks_like_path
from seqblocks.suggestions import did_you_mean, instead_of

if TYPE_CHECKING:
    from seqblocks.descriptions.reference import Verb


def list(options: argparse.Namespace) -> int:  # noqa: A001 - it has the name of its command
    """List the bundled specs, models first."""
    rows: dict[str, dict[str, dict[str, Any]]] = {"models": {}, "blocks": {}}
    for name in bundled():
        file, model = check.load_spec(name)
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
    """List all verbs or the blocks of a spec, or describe a single one."""
    from seqblocks.descriptions import reference

    source, colons, name = (options.name or "").partition("::")
    if colons or (source and looks_like_path(source)):
        return _blocks_of(source, name, options)
    verbs = reference.verbs()
    output.notes([*op.load_plugins()], options)
    if options.name is None:
        _list_verbs(verbs, options)
    elif options.name in verbs:
        verb = verbs[options.name]
        output.dump(reference.facts(verb)) if options.format == "json" else output.write(reference.text(verb))
    elif bundle := _bundle(options.name):
        _show_block(check.load_spec(bundle)[0].blocks[options.name], bundle, options)
    else:
        raise _unknown_verb(options.name, verbs)
    return 0


def _list_verbs(verbs: dict[str, Verb], options: argparse.Namespace) -> None:
    from seqblocks.descriptions import reference

    if options.format == "json":
        output.dump({name: reference.facts(verb) for name, verb in verbs.items()})
        return
    width = max(map(len, verbs))
    for name, verb in verbs.items():
        output.write(f"  {name:<{width}}  {reference.about(verb).partition(chr(10))[0]}".rstrip())


def _unknown_verb(name: str, verbs: Iterable[str]) -> UsageError:
    blocks = [n for s, p in bundled().items() if p.parent.name == "blocks" for n in check.load_spec(s)[0].blocks]
    lists = (
        "list verbs with `seqblocks ops`, blocks of a file with `seqblocks ops my.yaml`, specs with `seqblocks list`"
    )
    hint = instead_of(name) or did_you_mean(name, [*verbs, *blocks]) or lists
    if spec := bundled().get(name):
        blocks_of_it = f"`seqblocks ops {name}::` lists its blocks"
        hint = f"it is a bundled spec: {blocks_of_it if spec.parent.name == 'blocks' else f'`seqblocks show {name}`'}"
    return UsageError(f"there is no verb {quote(name)}: {hint}")


def _blocks_of(source: str, name: str, options: argparse.Namespace) -> int:
    """List the blocks of a spec (`my.yaml`), or describe one of them (`my.yaml::block`)."""
    blocks = check.load_spec(source, allow_use=options.allow_use)[0].blocks
    if not blocks:
        raise UsageError(f"{visible(source)} defines no blocks")
    use = source if source in bundled() or "/" in source else f"./{source}"
    if name:
        if name not in blocks:
            hint = did_you_mean(name, blocks) or f"it defines {listing(blocks)}"
            raise UsageError(f"{visible(source)} defines no block {quote(name)}: {hint}")
        _show_block(blocks[name], use, options)
    elif options.format == "json":
        output.dump({each.name: _facts(each, use) for each in blocks.values()})
    else:
        width = max(map(len, blocks))
        for each in blocks.values():
            output.write(f"  {each.name:<{width}}  {each.about}".rstrip())
    return 0


def _bundle(name: str) -> str | None:
    """Return the bundled file that defines a block, or None."""
    for source, path in bundled().items():
        if path.parent.name == "blocks" and name in check.load_spec(source)[0].blocks:
            return source
    return None


def _facts(block: Block, use: str) -> dict[str, Any]:
    """Return the facts about a block as plain data."""
    from seqblocks.language import document

    defaults = {a.name: a.default and document.plain(a.default) for a in block.args.values()}
    arguments = [
        {"name": a.name, "type": a.type, "default": defaults[a.name], "about": a.meaning()} for a in block.args.values()
    ]
    return {"name": block.name, "use": use, "about": block.about, "arguments": arguments}


def _show_block(block: Block, use: str, options: argparse.Namespace) -> None:
    facts = _facts(block, use)
    output.dump(facts) if options.format == "json" else output.write(_described(facts))


def _described(block: dict[str, Any]) -> str:
    about = f": {block['about']}" if block["about"] else ""
    lines = [f"{block['name']}{about}", "", f"a block; the spec says  use: [{block['use']}]"]
    if block["arguments"]:
        lines += ["", "arguments:"]
        width = max(len(a["name"]) for a in block["arguments"])
        for a in block["arguments"]:
            given = a["default"] if isinstance(a["default"], str) else as_text(a["default"])
            default = "required" if a["default"] is None else f"default {given}"
            lines.append(f"  {a['name']:<{width}}  {a['type']}, {default}" + (f": {a['about']}" if a["about"] else ""))
    return "\n".join(lines)


def show(options: argparse.Namespace) -> int:
    """Show a spec at one stage of the analysis, or the YAML of a bundled spec."""
    from seqblocks.cli.check import analysed, load, overrides, valid

    if options.source:
        return _source(options)
    found: Any = None
    if options.format == "json" and options.stage == "steps":
        raise UsageError("--stage steps is text for git diff; --stage graph has the steps as JSON")
    if options.format == "json" and options.stage in (None, "graph"):
        found = analysed(options.spec, options, overrides(options), references=True)
        file, model = valid(found)
    else:
        file, model = load(options.spec, options)
    stage = options.stage or ("graph" if model is not None else "spec")
    if stage == "plan":
        from seqblocks.cli import explain

        return explain.show_plan(check.require_model(file, model), options.spec, options)
    if options.format == "json":
        if stage == "graph":
            check.require_model(file, model)
            found = found.as_data()
        else:
            found = _stage_data(stage, file)
        remarks = output.remarks_on(model) if model else {}
        output.dump({"version": __version__, "ok": True, "spec": options.spec, "stage": stage, stage: found} | remarks)
    else:
        output.write(_stage_text(stage, file, model, options.spec))
    return 0


def _stage_text(stage: str, file: SpecFile, model: ModelSpec | None, name: str) -> str:
    from seqblocks.descriptions import listing, outline
    from seqblocks.language import document

    if stage == "document":
        return document.show(file.root)
    if stage == "steps":
        from seqblocks.architect import steps

        found = check.require_model(file, model)
        return "\n".join(steps.lines(steps.steps_of(found.graph, found.labels)))
    return outline.text(file, visible(name)) if stage == "spec" else listing.text(check.require_model(file, model))


def _stage_data(stage: str, file: SpecFile) -> Any:
    from seqblocks.descriptions import outline
    from seqblocks.language import document

    return document.plain(file.root) if stage == "document" else outline.data(file)


def _source(options: argparse.Namespace) -> int:
    """Print a bundled spec verbatim, as a template for your own."""
    if options.stage:
        raise UsageError("--source prints the original YAML and cannot be combined with --stage")
    if options.set:
        raise UsageError("--source prints the original YAML and cannot be combined with --set")
    path = bundled().get(options.spec)
    if path is None:
        if options.spec == "-" or looks_like_path(options.spec):
            raise UsageError(f"--source prints bundled specs, and {quote(options.spec)} is a file")
        hint = did_you_mean(options.spec, bundled()) or "`seqblocks list` shows the bundled specs"
        raise UsageError(f"there is no bundled spec {quote(options.spec)}: {hint}")
    text = path.read_text(encoding="utf-8")
    if options.format == "json":
        output.dump({"version": __version__, "ok": True, "spec": options.spec, "source": text})
    else:
        output.write(text.removesuffix("\n"), raw=True)
    return 0


def schema(options: argparse.Namespace) -> int:
    """Print the JSON schema of the language."""
    from seqblocks.cli.check import load
    from seqblocks.descriptions.schema import schema as made

    file = None
    if options.spec is not None:
        file, _ = load(options.spec, options)
    output.dump(made(file))
    return 0
