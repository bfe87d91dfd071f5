"""Read a document into a typed spec (let, blocks, model, expect), including the files that it imports with `use`.

Only structure is checked here (known keys, valid names, which file a name comes from). The meaning of the steps is
analysed in `seqblocks/analysis`, once the numbers are known.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path

from seqblocks.errors import (
    Diagnostic,
    Fault,
    Note,
    Report,
    Source,
    SourceKind,
    Span,
    listing,
    quote,
)
from seqblocks.language import document
from seqblocks.language.arguments import Argument, plain_default, read_argument, read_bound, typed_default
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.keys import is_name, known_keys, required, text_of
from seqblocks.language.spec_files import ENDINGS, bundled, cannot_be_read, looks_like_path, read_text, specs_beside
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean, missing_colon, nearest

VERSION = 1
MAX_USES = 32  # depth of nested `use:`, as files are read recursively
FILE_KEYS = ("seqblocks", "about", "needs", "use", "let", "blocks", "model", "expect", "checkpoint", "init")
BLOCK_KEYS = ("about", "args", "let", "steps", "outputs", "checkpoint", "init")
MODEL_KEYS = ("about", "input", "inputs", "steps", "outputs")
TO_THE_TOP = "to the top level of the file"
EXPECT_KEYS = (
    "params", "active_params", "state_bytes", "flops_per_token", "output", "lookahead", "latency_ms", "tolerance",
)  # fmt: skip
FIGURES = ("params", "active_params", "state_bytes", "flops_per_token", "latency_ms")  # keys of `expect` with limits
BUDGET_KEYS = ("about", "at_most", "at_least", "tolerance")
FAN_IN = "fan_in"  # in a rule of `init:`: the inputs of the matrix that it initialises
_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"


class Block(Record):
    """A block as defined in some file."""

    name: str
    span: Span
    home: SpecFile
    about: str
    args: dict[str, Argument]
    let: Mapping | None
    steps: Node | None
    checkpoint: Mapping | None
    init: Mapping | None = None
    incomplete: bool = False  # whether some of its arguments were invalid
    outputs: tuple[Scalar, ...] = ()  # the names of the wires that steps around it can read, besides its result


class SpecFile(Record):
    """One file: its own definitions, and what is visible in it."""

    source: Source
    root: Mapping
    about: str = ""
    let: Mapping | None = None
    blocks: dict[str, Block] = field(default_factory=dict)
    visible: dict[str, Block] = field(default_factory=dict)
    model: Mapping | None = None
    model_span: Span | None = None
    expect: Mapping | None = None
    checkpoint: Mapping | None = None
    init: Mapping | None = None
    incomplete: bool = False  # whether some verbs of `use:` or `blocks:` could not be read
    warnings: tuple[Diagnostic, ...] = ()  # set by the analysis
    dropped: int = 0  # number of warnings over the limit


# --- reading a file ---------------------------------------------------------------------------------------------------


class _Found(Record):
    """A file in `use:`, with its name for messages, and its path relative to the folder of the spec."""

    path: Path
    shown: str
    relative: str
    kind: SourceKind


_EXAMPLES = {
    "args": "{dim: int, heads: 4}", "blocks": "{mine: {steps: […]}}", "checkpoint": "{head: classifier}",
    "expect": "{params: 1_000}", "init": '{"*.bias": zeros}', "let": "{dim: 64}",
    "model": "{input: {tokens: 256}, steps: […]}",
}  # fmt: skip


class Reader:
    """Read a file, and each of the files that it uses, once."""

    def __init__(
        self,
        report: Report,
        is_builtin: Callable[[str], bool],
        has_plugin: Callable[[str], bool],
        base: Path | None = None,
        provided: dict[str, str] | None = None,
        allowed: Iterable[Path] = (),
        warnings: Report | None = None,
    ) -> None:
        self.report, self.warnings = report, warnings
        self.is_builtin = is_builtin  # whether a verb is built in
        self.has_plugin = has_plugin  # whether a plug-in was imported
        self.base = base or Path()
        self.provided = provided  # texts of used files, if they are not read from disk
        self.allowed = tuple(allowed)  # further folders whose files may be used
        self.texts: dict[str, str] = {}  # texts read so far, by path relative to the base; bundled files by name
        self.size = 0  # total nodes of the files in use
        self.files: dict[str, SpecFile | None] = {}
        self.open: list[str] = []

    def read(self, root: Node | None, source: Source, folder: str) -> SpecFile | None:
        """Turn a parsed document into a spec. `use:` paths are relative to `folder`, which is relative to base."""
        if root is None:
            return None
        if not isinstance(root, Mapping):
            text = root.text if isinstance(root, Scalar) else ""
            hint = missing_colon(text, FILE_KEYS) or f"begin with `seqblocks: {VERSION}`"
            self.report.fault(Fault("E203", "a spec must be a mapping", found=kind_of(root), hint=hint), root.span)
            return None
        file = SpecFile(source, root)
        known_keys(self.report, root, FILE_KEYS, "a spec", MODEL_KEYS, "into `model:`")
        self._version(root)
        file.about = text_of(self.report, root, "about")
        file.let = self._mapping(root, "let")
        file.expect = self._mapping(root, "expect")
        if file.expect:
            known_keys(self.report, file.expect, EXPECT_KEYS, "expect")
        file.checkpoint = self._mapping(root, "checkpoint")
        file.init = self._mapping(root, "init")
        file.model = self._mapping(root, "model")
        if file.model:
            file.model_span = root.entries["model"][0] if "model" in root.entries else None
            known_keys(self.report, file.model, MODEL_KEYS, "model", FILE_KEYS, TO_THE_TOP)
        self._use(file, folder)
        self._misplaced(file)
        self._needs(file)
        blocks = self._mapping(root, "blocks")
        for name, span, node in blocks or ():
            self._block(file, name, span, node)
        file.incomplete |= blocks is not None and blocks.incomplete
        for block in file.blocks.values():
            self._check_passed(block)
        return file

    def _mapping(self, root: Mapping, key: str) -> Mapping | None:
        """Return the mapping under a key, None if absent, or an empty incomplete one if it may have been lost."""
        node = root.get(key)
        if isinstance(node, Mapping):
            return node
        if isinstance(node, Scalar) and node.value is None:
            return None
        if node is not None:
            hint = missing_colon(node.text if isinstance(node, Scalar) else "") or f"{key}: {_EXAMPLES[key]}"
            self.report.fault(Fault("E203", f"{key} must be a mapping", found=kind_of(node), hint=hint), node.span)
        elif not root.incomplete:
            return None
        return Mapping(root.span, 1, 1, {}, incomplete=True)

    def _misplaced(self, file: SpecFile) -> None:
        """Mark names and verbs as incomplete if the section that defines them is in the model."""
        found = file.model.entries if file.model else {}
        if "let" in found:
            file.let = file.let or Mapping(file.root.span, 1, 1, {})
            file.let.incomplete = True
        file.incomplete |= "use" in found or "blocks" in found

    def _version(self, root: Mapping) -> None:
        start = root.span._replace(end_line=root.span.line, end_column=root.span.column + 1)
        message = "the spec does not declare its language version"
        missing = Fault("E205", message, hint=f"begin with `seqblocks: {VERSION}`")
        node = required(self.report.fault, root, "seqblocks", missing, start)
        if node and (not isinstance(node, Scalar) or node.value != VERSION or isinstance(node.value, bool)):
            fault = Fault("E205", "unknown version of the language", expected=str(VERSION), found=kind_of(node))
            self.report.fault(fault, node.span)

    def _use(self, file: SpecFile, folder: str) -> None:
        node = file.root.get("use")
        if node is None:
            file.incomplete = file.root.incomplete
            return
        if not isinstance(node, Sequence):
            name = node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None
            fault = Fault("E203", "use must be a list", found=kind_of(node), hint=f"use: [{name or 'vil'}]")
            self.report.fault(fault, node.span)
            file.incomplete = True
            return
        for item in node.items:
            if not isinstance(item, Scalar) or not isinstance(item.value, str):
                fault = Fault("E203", "use takes names of bundled specs and paths", found=kind_of(item))
                self.report.fault(fault, item.span)
                file.incomplete = True
                continue
            other = self.used_file(item.value, item.span, folder)
            file.incomplete |= other is None or other.incomplete
            for name, block in (other.blocks if other else {}).items():
                clash = file.visible.get(name)
                if clash and clash is not block:
                    notes = [Note("defined here", clash.span), Note("and here", block.span)]
                    fault = Fault("E309", f"block {quote(name)} is defined in two of the used files", notes=notes)
                    self.report.fault(fault, item.span)
                file.visible[name] = block

    def _needs(self, file: SpecFile) -> None:
        """Report missing plug-ins. Their verbs become UNKNOWN, so that they cause no follow-on errors."""
        node = file.root.get("needs")
        if node is None:
            return
        if not isinstance(node, Sequence):
            fault = Fault("E203", "needs must be a list", found=kind_of(node), hint="needs: [my_ops]")
            self.report.fault(fault, node.span)
            file.incomplete = True
            return
        for item in node.items:
            name = item.value if isinstance(item, Scalar) else None
            if not isinstance(name, str) or name.endswith(".py") or not re.fullmatch(_MODULE, name):
                stem = Path(name).stem if isinstance(name, str) and name.endswith(".py") else None
                message = "needs takes module names"
                hint = f"needs: [{stem}]" if stem else None
                fault = Fault("E203", message, expected="a name such as my_ops", found=kind_of(item), hint=hint)
                self.report.fault(fault, item.span)
                file.incomplete = True
            elif not self.has_plugin(name):
                message = f"the spec needs the plug-in {quote(name)}, which was not imported"
                self.report.fault(Fault("E329", message, hint=_plugin_hint(name)), item.span)
                file.incomplete = True

    def used_file(self, name: str, span: Span, folder: str) -> SpecFile | None:
        """Return a file in `use:`, read at its first use, or report an error and return None."""
        found = self._find(name, span, folder)
        if found is None:
            return None
        key = _absolute(found.path)
        if key in self.open:
            ring = map(os.path.basename, [*self.open[self.open.index(key) :], key])
            message = f"the files use each other: {' -> '.join(ring)}"
            self.report.fault(Fault("E307", message, hint="move the shared blocks to a third file"), span)
            return None
        if key not in self.files:
            self.files[key] = None
            self.files[key] = self._read_used(name, found, key, span)
        return self.files[key]

    def _find(self, name: str, span: Span, folder: str) -> _Found | None:
        if looks_like_path(name):
            relative = os.path.normpath(os.path.join(folder, name))
            path = self.base / relative
            return _Found(path, os.path.normpath(path), relative, "own")
        found = bundled()
        if name not in found and name not in (self.provided or {}):
            blocks = [stem for stem, path in found.items() if path.parent.name == "blocks"]
            fault = Fault(
                "E306",
                f"there is no bundled spec {quote(name)}",
                expected=f"one of {listing(blocks)}",
                hint=lambda: did_you_mean(name, blocks) or "to use a file, write its path: ./blocks.yaml",
            )
            self.report.fault(fault, span)
            return None
        return _Found(found.get(name, Path(name)), f"<bundled {name}>", str(found.get(name, name)), "bundled")

    def _read_used(self, name: str, found: _Found, key: str, span: Span) -> SpecFile | None:
        if len(self.open) > MAX_USES:
            self.report.fault(Fault("E104", "`use` is nested too deeply", expected=f"at most {MAX_USES} levels"), span)
            return None
        own, provided = found.kind == "own", self.provided or {}
        if own:
            text = self._text_in_use(name, found.relative, found.path, found.shown, span)
        else:
            text = provided[name] if name in provided else read_text(found.path, found.shown, self.report)
        if text is None:
            return None
        self.texts[found.relative if own else name] = text
        source = Source.of(found.shown, text, found.kind)
        tree = document.parse(source, self.report, self.warnings)
        self.size += tree.size if tree and (own or name in provided) else 0
        if self.size > document.MAX_NODES:
            expected = f"at most {document.MAX_NODES:,} nodes in total"
            self.report.fault(Fault("E104", "the used files are too large", expected=expected), span)
            return None
        self.open.append(key)
        file = self.read(tree, source, os.path.dirname(found.relative))
        self.open.pop()
        return file

    def _text_in_use(self, name: str, relative: str, path: Path, shown: str, span: Span) -> str | None:
        """Return the text of a file in `use:`, or report an error and return None. Check permission before reading."""
        if self.provided is not None:
            if relative not in self.provided:
                fault = Fault("E306", f"there is no file {quote(name)} among the files provided with the spec")
                self.report.fault(fault, span)
            return self.provided.get(relative)
        try:
            target = path.resolve()
            folders = [folder.resolve() for folder in (self.base, *self.allowed)]
        except (OSError, RuntimeError, ValueError) as error:  # circular links, a null byte
            self.report.fault(cannot_be_read(shown, str(error)), span)
            return None
        if not (name.endswith(ENDINGS) and target.name.endswith(ENDINGS)):
            what = "links to a file with another extension" if name.endswith(ENDINGS) else "has another extension"
            message = f"`use` may not read {quote(name)}: it {what}"
            self.report.fault(Fault("E804", message, expected=f"a file that ends in {' or '.join(ENDINGS)}"), span)
            return None
        if not any(target.is_relative_to(folder) for folder in folders):
            message = f"`use` may not read {quote(name)}: it is outside the allowed folders"
            hint = "if you trust the spec, allow the folder: `--allow-use DIR`, in Python `allow_use=`"
            self.report.fault(Fault("E804", message, expected="a file below the folder of the spec", hint=hint), span)
            return None
        if not os.path.lexists(path):
            fault = Fault(
                "E306",
                f"there is no file {quote(name)}",
                found=f"no such file: {shown}",
                hint=lambda: did_you_mean(path.name, specs_beside(path)),
            )
            self.report.fault(fault, span)
            return None
        return read_text(target, shown, self.report, span)

    def _may_be_block(self, file: SpecFile, name: str, span: Span) -> bool:
        """Return whether a block may have this name; report it if not. Its uses are then UNKNOWN."""
        if not is_name(self.report, name, span):
            return False
        if self.is_builtin(name):
            fault = Fault("E309", f"{quote(name)} is a built-in verb", hint="give the block another name")
            self.report.fault(fault, span)
            return False
        if clash := file.visible.get(name):
            message = f"block {quote(name)} is already defined"
            notes = [Note("the other one is here", clash.span)]
            self.report.fault(Fault("E309", message, hint="give the block another name", notes=notes), span)
            return False
        return True

    def _is_mapping(self, name: str, node: Node) -> bool:
        if not isinstance(node, Mapping):
            fault = Fault("E203", f"block {name} must be a mapping", found=kind_of(node), hint="steps: […]")
            self.report.fault(fault, node.span)
        return isinstance(node, Mapping)

    def _block(self, file: SpecFile, name: str, span: Span, node: Node) -> None:
        if not (self._may_be_block(file, name, span) and self._is_mapping(name, node)):
            unknown = Block(name, span, file, "", {}, None, None, None, incomplete=True)
            file.blocks[name] = file.visible[name] = unknown
            return
        assert isinstance(node, Mapping)
        known_keys(self.report, node, BLOCK_KEYS, f"block {name}", FILE_KEYS, TO_THE_TOP)
        file.incomplete |= "use" in node.entries or "blocks" in node.entries
        let, given = self._mapping(node, "let"), self._mapping(node, "args")
        args = {a.name: a for k, s, n in given or () if (a := read_argument(self.report, k, s, n))}
        let = self._no_argument_again(let, args)
        names_in_block = {*args, *(let.entries if let else ())}
        earlier: dict[str, Argument] = {}
        for argument in args.values():
            plain_default(self.report, argument, names_in_block, earlier, args)
            typed_default(self.report, argument)
            written = given.get(argument.name) if given else None
            if isinstance(written, Mapping) and ("type" in written.entries or "default" in written.entries):
                argument.at_least = read_bound(self.report, written, "at_least", argument)
                argument.at_most = read_bound(self.report, written, "at_most", argument)
            if argument.type not in ("wire", "steps"):
                earlier[argument.name] = argument
        steps = required(self.report.fault, node, "steps", Fault("E202", f"block {name} has no steps"), span)
        lists = [argument for argument in args.values() if isinstance(argument.default, Sequence)]
        run = verbs_in(steps) if lists else ()
        for argument in lists:
            argument.type = "steps" if argument.name in run else "any"
        names, init = self._mapping(node, "checkpoint"), self._mapping(node, "init")
        incomplete = given is not None and (given.incomplete or len(args) < len(given.entries))
        about, outputs = text_of(self.report, node, "about"), self._outputs(node, name)
        block = Block(name, span, file, about, args, let, steps, names, init, incomplete, outputs)
        file.blocks[name] = file.visible[name] = block

    def _outputs(self, node: Mapping, name: str) -> tuple[Scalar, ...]:
        """Return the names in `outputs:` of a block; report what is no name (E203, E318)."""
        given = node.get("outputs") if "outputs" in node.entries else None
        if given is None:
            return ()
        if not isinstance(given, Sequence) or not given.items:
            found = "an empty list" if isinstance(given, Sequence) else kind_of(given)
            message, hint = f"outputs of block {name} must be a list of wires", "outputs: [k, v]"
            self.report.fault(Fault("E318", message, found=found, hint=hint), given.span)
            return ()
        names: dict[str, Scalar] = {}
        for item in given.items:
            if not isinstance(item, Scalar) or not isinstance(item.value, str):
                message = "an output must be the name of a wire"
                self.report.fault(Fault("E203", message, found=kind_of(item)), item.span)
            elif item.text in names:
                self.report.fault(Fault("E318", f"the output {quote(item.text)} is listed twice"), item.span)
            else:
                names[item.text] = item
        return tuple(names.values())

    def _no_argument_again(self, let: Mapping | None, args: dict[str, Argument]) -> Mapping | None:
        """Return `let:` of a block without entries that have the name of an argument, which are reported."""
        if let is None or not args.keys() & let.entries.keys():
            return let
        for name, span, _ in let:
            if name in args:
                notes = [Note("the argument is declared here", args[name].span)]
                hint = "give the value another name, or remove the argument"
                fault = Fault("E309", f"{quote(name)} is already an argument of the block", notes=notes, hint=hint)
                self.report.fault(fault, span)
        others = copy.copy(let)  # another block may use the same mapping by an alias
        others.entries = {name: entry for name, entry in let.entries.items() if name not in args}
        return others

    def _check_passed(self, block: Block) -> None:
        """Check that a block runs its arguments of type `steps`, and that their names do not clash with other verbs."""
        passed = {name: argument for name, argument in block.args.items() if argument.type == "steps"}
        run = verbs_in(block.steps) if passed else set()
        unknown = [verb for verb in run if not (self.is_builtin(verb) or verb in block.home.visible)]
        for name, argument in passed.items():
            if self.is_builtin(name) or name in block.home.visible:
                self.report.fault(_named_like_verb(name, block.home.visible.get(name)), argument.span)
            elif name not in run and block.steps and not nearest(name, unknown):  # a near match is a misspelt verb
                message = f"block {block.name} never runs the steps of its argument {quote(name)}"
                hint = f"add the step `- {name}`, or remove the argument"
                self.report.fault(Fault("E323", message, hint=hint), argument.span)

def _named_like_verb(name: str, block: Block | None) -> Fault:
    """Return the fault of an argument of type `steps`. block: with the same name; None if the verb is built in."""
    what = "a block" if block else "a built-in verb"
    message = f"an argument of type `steps` becomes a verb, but {quote(name)} is already {what}"
    notes = [Note("the block is here", block.span)] if block else []
    return Fault("E309", message, notes=notes, hint="give the argument another name")


def verbs_in(steps: Node | None) -> set[str]:
    """Return the verbs of all steps in a list of steps, including inner lists."""
    found: set[str] = set()
    waiting = [steps]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            waiting += [value for _, _, value in node]
        elif isinstance(node, Sequence):
            found.update(item.value for item in node.items if isinstance(item, Scalar) and isinstance(item.value, str))
            found.update(next(iter(item.entries)) for item in node.items if isinstance(item, Mapping) and item.entries)
            waiting += node.items
    return found


def _plugin_hint(name: str) -> str:
    """Return the hint for a missing plug-in, which may be a file with its name."""
    file = f"{name.replace('.', os.sep)}.py"
    if os.path.isfile(file):
        return f"if you trust it: `--import {file}`, in Python `import {name}`"
    return f"install the package that contains it, then import it: `--import {name}`, in Python `import {name}`"


def read_file(reader: Reader, source: Source, edit: Callable[[Node], None]) -> SpecFile | None:
    """Read one file. `edit(root)` may first replace nodes (to apply overrides)."""
    tree = document.parse(source, reader.report, reader.warnings)
    if tree is not None:
        edit(tree)
    reader.open.append(_absolute(reader.base / Path(source.name).name))
    return reader.read(tree, source, "")


def _absolute(path: Path) -> str:
    """Return an absolute path. A relative one stays relative if the working directory was removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        return os.path.normpath(path)
