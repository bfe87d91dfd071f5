"""Analyse one use of a block by itself: the spec of a layer, for `seqblocks.block`.

The block is used by a model with a single step, whose line appears in messages. The layer is the body of that step, so
that its parameters and states have the names in the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seqblocks.analysis import check
from seqblocks.analysis.analyse import RawText, allowed_folders
from seqblocks.analysis.lower import is_builtin, lower_file
from seqblocks.analysis.passes.kept_context import mark_kept
from seqblocks.errors import Fault, Report, Source, SourceKind, SpecError, UsageError, in_order, listing, quote
from seqblocks.graph import ModelSpec, Node
from seqblocks.language import document
from seqblocks.language.arguments import STEP_KEYS
from seqblocks.language.overrides import as_text
from seqblocks.language.spec import Block, Reader, SpecFile, read_file, verbs_in
from seqblocks.language.spec_files import bundled, locate, looks_like_path, read_text
from seqblocks.op import has_plugin
from seqblocks.suggestions import did_you_mean

RANGES = "W904"  # not reported of a block with wires, which get their ranges from the caller
ANY_WIDTH = 64  # of the input, where the width is an argument with a fault that is reported anyway


class Layer(NamedTuple):
    """The spec of a block as a layer. wires: the widths of its wires that are read with each token, by name.

    If there are such wires, the input of the spec is `x` and these wires, joined along the features.
    """

    spec: ModelSpec
    wires: dict[str, int]


class Ends(NamedTuple):
    """What the caller says about input and output.

    features: the width of x. input: an entry as in `input:`. outputs: the names of equal parts of the output, or names
    and widths.
    """

    features: Any = None
    input: Any = None
    outputs: Any = None


def of_bundled(name: str, given: Mapping[str, Any], ends: Ends) -> Layer:
    """Return the layer of a bundled block. Raises SpecError for an unknown block or invalid arguments."""
    if looks_like_path(name):
        raise UsageError(f'{name} is a file: say which of its blocks to use, block("{name}", "name", …)')
    report = Report()
    found = file_of(name)
    if found is None:
        raise _error(_no_bundled_block(name, [*_names()], _blocks_of(name)))
    path = bundled()[found]
    text = read_text(path, found, report)
    assert text is not None
    return _layer(_Text(text, f"<bundled {found}>", path.parent, "bundled"), name, given, ends)


def of_file(spec: Any, name: str, given: Mapping[str, Any], ends: Ends, allow_use: check.Folders = ()) -> Layer:
    """Return the layer of a block in a spec, given by path or bundled name."""
    text, shown, base = locate(spec)
    return _layer(_Text(text, shown, base, "own"), name, given, ends, allow_use)


def of_text(text: str, name: str, given: Mapping[str, Any], ends: Ends, allow_use: check.Folders = ()) -> Layer:
    """Return the layer of a block in a spec given as text."""
    if not isinstance(text, str):
        raise UsageError(f"expected the text of a spec as str, not {type(text).__name__}; use block for a path")
    return _layer(_Text(text, "<text>", None, "text"), name, given, ends, allow_use)


# --- bundled blocks ---------------------------------------------------------------------------------------------------


def block_files() -> Iterable[tuple[str, Path]]:
    """Return the names and paths of the bundled files that contain only blocks."""
    return ((name, path) for name, path in bundled().items() if path.parent.name == "blocks")


def file_of(name: str) -> str | None:
    """Return the bundled file that defines a block, or None."""
    for file, path in block_files():
        if f"\n  {name}:" in path.read_text(encoding="utf-8") and name in _blocks_of(file):
            return file
    return None


def _names() -> Iterable[str]:
    return (name for file, _ in block_files() for name in _blocks_of(file))


def _blocks_of(file: str) -> list[str]:
    """Return the names of the blocks of a bundled file, empty if there is no such file."""
    if file not in dict(block_files()):
        return []
    root = document.parse(Source.of(file, bundled()[file].read_text(encoding="utf-8")), Report())
    blocks = root.get("blocks") if isinstance(root, document.Mapping) else None
    return [*blocks.entries] if isinstance(blocks, document.Mapping) else []


# --- the model with one step ------------------------------------------------------------------------------------------


class _Text(NamedTuple):
    """The text that defines a block."""

    text: str
    shown: str
    base: Path | None
    kind: SourceKind


def _layer(text: _Text, name: str, given: Mapping[str, Any], ends: Ends, allow_use: check.Folders = ()) -> Layer:
    report, cautions = Report(), Report()
    reader = Reader(report, is_builtin, has_plugin, text.base, None, allowed_folders(allow_use), cautions)
    file = read_file(reader, Source.of(text.shown, text.text, text.kind), lambda root: None)
    if file is None or report:
        raise SpecError(in_order(report.diagnostics), report.dropped)
    block = file.visible.get(name)
    if block is None:
        blocks = [*{**file.blocks, **file.visible}]
        expected = f"one of {listing(blocks)}" if blocks else None
        hint = did_you_mean(name, blocks) or (None if blocks else "define one in `blocks:`")
        raise _error(Fault("E301", f"{text.shown} has no block {quote(name)}", expected=expected, hint=hint))
    if key := next((key for key in given if key in STEP_KEYS), None):
        hint = f"`{key}:` belongs to a step of a spec, and a layer is a block by itself"
        raise _error(Fault("E201", f"block {name} has no argument {quote(key)}", hint=hint))
    wires = _wires(block, given, ends)
    root = document.parse(_use_of(block, given, ends, wires), report)
    report.raise_if_any()
    assert isinstance(root, document.Mapping)
    _import_bundled(reader, file, root)
    model = root.get("model")
    assert isinstance(model, document.Mapping)
    file.model, file.model_span, file.expect, file.checkpoint = model, model.span, None, None
    file.blocks = {name: block}
    found = lower_file(file, report, cautions, name).model
    if found is None or report:
        raise SpecError(in_order(report.diagnostics), report.dropped)
    known = [each for each in cautions.diagnostics if not (found.graph.ports or wires) or each.code != RANGES]
    check.warn(in_order(known))
    return Layer(_inside(found, name, bool(wires)), wires)


def _error(fault: Fault) -> SpecError:
    return SpecError([fault.as_diagnostic(None)])


def _no_bundled_block(name: str, known: list[str], in_file: list[str]) -> Fault:
    """Return the fault of a name that is no bundled block. in_file: the blocks of a bundled file of this name."""
    hint = did_you_mean(name, known) or 'docs/blocks.md lists them; for your own: block("my.yaml", "name", …)'
    if in_file:
        hint = f"it is a file with the blocks {listing(in_file)}: pass one of these names"
    elif is_builtin(name):
        hint = f"{name} is a step: define a block that contains it, and pass it to block_text"
    return Fault("E301", f"there is no bundled block {quote(name)}", hint=hint)


def _no_width(block: Block) -> Fault:
    has_wires = any(argument.type == "wire" for argument in block.args.values())
    hint = "features=64" + ("" if has_wires else ', or input={"image": {"size": 32}}')
    return Fault("E202", f"the arguments of {block.name} do not give the width of its input", hint=f"pass {hint}")


def _no_wire(block: str, wire: str, width: object) -> Fault:
    what = f"pass {wire}={width} for {width} features next to each token of the input"
    other = f'{wire}={{"features": {width}}} for a sequence with a length of its own'
    return Fault("E411", f"block {block} needs its input {quote(wire)}", hint=f"{what}, or {other}")


def _wires(block: Block, given: Mapping[str, Any], ends: Ends) -> dict[str, int]:
    """Return the widths of the wires that are read with each token. Raises SpecError for an invalid or missing one."""
    found = {}
    for name in (each.name for each in block.args.values() if each.type == "wire"):
        value = given.get(name)
        if value is None:
            raise _error(_no_wire(block.name, name, ends.features or given.get("dim") or ANY_WIDTH))
        if isinstance(value, Mapping):
            continue
        width = document.resolve(as_text(value))
        if isinstance(width, int) and not isinstance(width, bool):
            found[name] = width
        else:
            expected = 'a number of features, or an input as in `inputs:`, such as {"features": 64} or {"vector": 8}'
            found_type = type(value).__name__
            raise _error(Fault("E203", f"{quote(name)} is a wire", expected=expected, found=found_type))
    others = {"image", "tokens", "vector"} & set(ends.input or ())
    if found and others:
        wire = next(iter(found))
        message = f"{quote(wire)} cannot have features next to each token of the input, which is {min(others)}"
        raise _error(Fault("E203", message, hint=f'pass {wire}={{"features": …}}, or {{"vector": …}}'))
    return found


def _use_of(block: Block, given: Mapping[str, Any], ends: Ends, wires: Mapping[str, int]) -> Source:
    """Return the text of a model that uses the block once, between steps that split its input and its output."""
    context = {name: value for name, value in given.items() if name in block.args and _is_context(block, name, value)}
    named = {name: _value(value) for name, value in given.items() if name not in wires and name not in context}
    named |= {name: f"{name}_in" for name in wires} | {name: name for name in context}
    own = _input(block, given, ends, sum(wires.values()))
    lines = ["seqblocks: 1", "model:"]
    if context:
        lines += ["  inputs:", f"    x: {own}", *(f"    {name}: {as_text(value)}" for name, value in context.items())]
    else:
        lines += [f"  input: {own}"]
    lines += ["  steps:"]
    if wires:
        widths = {"x_in": _width(block, given, ends)} | {f"{name}_in": width for name, width in wires.items()}
        lines += [f"    - identity: {{as: {_flow(widths)}}}"]
        named = {"from": "x_in"} | named
    lines += [f"    - {block.name}: {_flow(named)}" if named else f"    - {block.name}"]
    if ends.outputs:
        lines += [f"    - identity: {{as: {as_text(ends.outputs)}, name: output_parts}}"]
        lines += [f"  outputs: {as_text([*ends.outputs])}"]
    return Source.of(f"block({block.name})", "\n".join([*lines, ""]), "text")


def _flow(entries: Mapping[str, Any]) -> str:
    """Return a mapping of names to YAML texts in one line."""
    return "{" + ", ".join(f"{name}: {text}" for name, text in entries.items()) + "}"


def _is_context(block: Block, name: str, value: Any) -> bool:
    return block.args[name].type == "wire" and isinstance(value, Mapping)


def _value(value: Any) -> str:
    return str(value) if isinstance(value, RawText) else as_text(value)


def _width(block: Block, given: Mapping[str, Any], ends: Ends) -> str:
    """Return the width of x as YAML: as given, or the block's argument `dim`."""
    width = ends.features
    if width is None and ends.input:
        width = ends.input.get("features")
    if width is None and "dim" in block.args:
        default = block.args["dim"].default
        width = given.get("dim", document.plain(default) if default else ANY_WIDTH)
        number = None if isinstance(width, str) else document.resolve(as_text(width))
        width = width if isinstance(width, str) or (isinstance(number, int) and number > 0) else ANY_WIDTH
    if width is None:
        raise _error(_no_width(block))
    return str(width) if isinstance(width, str) else _value(width)


def _input(block: Block, given: Mapping[str, Any], ends: Ends, further: int) -> str:
    """Return the input as YAML. further: the width of the wires that are joined with it."""
    if ends.input is not None and not further:
        return as_text(ends.input)
    width = _width(block, given, ends)
    others = {key: as_text(value) for key, value in (ends.input or {}).items() if key != "features"}
    return _flow({"features": f'"{width} + {further}"' if further else width} | others)


def _import_bundled(reader: Reader, file: SpecFile, root: document.Mapping) -> None:
    """Make bundled blocks visible that the arguments of type `steps` use and the file does not import."""
    unknown = (verb for verb in sorted(verbs_in(root)) if not (is_builtin(verb) or verb in file.visible))
    for verb in unknown:
        used = file_of(verb) if verb.isidentifier() else None
        other = reader.used_file(used, root.span, "") if used else None
        if other:
            file.visible[verb] = other.blocks[verb]


# --- the layer --------------------------------------------------------------------------------------------------------


def _inside(model: ModelSpec, name: str, split: bool) -> ModelSpec:
    """Return the spec of the block in a model: its body, between the steps that split the input and the output.

    split: whether there is a step that splits the input. Steps after the block split the output.
    """
    nodes = model.graph.nodes
    body = nodes[split].bodies[""]
    context = {port: value for port, value in body.ports.items() if port in model.inputs}
    streamed = (value for port, value in body.ports.items() if port not in context)
    taken = {node.name for node in body.nodes}
    before = [_named(node._replace(outputs=(body.input, *streamed)), "wires", taken) for node in nodes[:split]]
    after = [_named(node._replace(inputs={"x": (body.result,)}), "outputs", taken) for node in nodes[split + 1 :]]
    graph = body._replace(
        input=model.graph.input if split else body.input,
        nodes=[*before, *body.nodes, *after],
        result=model.graph.result if after else body.result,
        outputs=model.graph.outputs,
        ports=context,
    )
    found = model._replace(name=name, graph=graph, checkpoint=body.checkpoint, source=None, expect=None)
    if context:
        mark_kept(found)
    return found


def _named(node: Node, name: str, taken: set[str]) -> Node:
    """Return the node with another name, which no step of the block has."""
    while name in taken:
        name += "_"
    return node._replace(name=name)
