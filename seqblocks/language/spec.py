"""Read a document into a typed spec (let, blocks, model, expect), including the files that it imports with `use`.

Only structure is checked here (known keys, valid names, which file a name comes from). The meaning of the steps is
analysed in `seqblocks/analysis`, once the numbers are known.
"""

from __future__ import annotations

import copy
import keyword
import os
import re
import stat
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import field
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, Protocol

from seqblocks import messages
from seqblocks.errors import Diagnostic, Fault, NoSpecError, Report, Source, SourceKind, Span, UsageError
from seqblocks.language import document
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import has_syntax, parse
from seqblocks.messages.suggestions import nearest
from seqblocks.record import Record

VERSION = 1
ENDINGS = (".yaml", ".yml")
MAX_USES = 32  # depth of nested `use:`, as files are read recursively
FILE_KEYS = ("seqblocks", "about", "needs", "use", "let", "blocks", "model", "expect", "checkpoint")
BLOCK_KEYS = ("about", "args", "let", "steps", "checkpoint")
MODEL_KEYS = ("about", "input", "inputs", "steps", "outputs")
TO_THE_TOP = "to the top level of the file"
EXPECT_KEYS = (
    "params", "active_params", "state_bytes", "flops_per_token", "output", "lookahead", "latency_ms", "tolerance",
)  # fmt: skip
DEPTH = "depth"  # in a step and in a default: the number of layers of the enclosing `repeat`s, multiplied
ARGUMENT_TYPES = ("int", "float", "bool", "word", "wire", "steps")
_TYPES_ELSEWHERE = {  # not in vocabulary.yaml, which is slow to read and not needed for a valid spec
    "integer": "int", "double": "float", "boolean": "bool", "str": "word", "string": "word", "tensor": "wire",
    **dict.fromkeys(("layers", "modules", "body", "network"), "steps"),
}  # fmt: skip
_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"


class Argument(Record):
    """An argument of a block: its type, and its default node unless it is required."""

    name: str
    type: str  # one of ARGUMENT_TYPES, or "any" if the default is a list, a mapping or empty
    span: Span
    default: Node | None
    is_valid: bool = True  # whether the default can be used
    by_depth: bool = False  # whether the default is an expression of `depth`


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
    incomplete: bool = False  # whether some of its arguments were invalid


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
    incomplete: bool = False  # whether some verbs of `use:` or `blocks:` could not be read
    warnings: tuple[Diagnostic, ...] = ()  # set by the analysis
    dropped: int = 0  # number of warnings over the limit


# --- locating specs -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def bundled() -> dict[str, Path]:
    """Return the bundled specs by name, blocks and models alike."""
    root = Path(__file__).parents[1] / "specs"
    folders = root / "blocks", root / "models"
    files = ((folder, file) for folder in folders for file in sorted(os.listdir(folder)) if file.endswith(".yaml"))
    return {file.removesuffix(".yaml"): folder / file for folder, file in files}


def looks_like_path(name: str) -> bool:
    """Return whether a SPEC or `use:` entry is a path rather than the name of a bundled spec."""
    return name.endswith(ENDINGS) or "/" in name or os.sep in name


def read_stream(file: BinaryIO, shown: str, report: Report, used: Span | None = None) -> str | None:
    """Read an open file as text, up to the size limit of a spec, or report an error and return None."""
    most = 4 * document.MAX_BYTES  # UTF-8 has up to 4 bytes per character; `document.parse` counts characters
    data = file.read(most + 1)
    if len(data) > most:
        report.fault(messages.spec.too_large(shown, document.MAX_BYTES), used)
        return None
    return document.decode(data, shown, report)


def read_text(path: Path, shown: str, report: Report, used: Span | None = None) -> str | None:
    """Read a file as text, or report an error and return None.

    `used` is the entry of `use:` that names the file, if any. In that case the file must be a regular one, since
    reading a pipe or a device could block forever.
    """
    try:
        if used is None:
            with path.open("rb") as file:
                return read_stream(file, shown, report)
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return read_stream(file, shown, report, used)
        report.fault(messages.spec.not_a_regular_file(shown), used)
    except OSError as error:
        reason = error.strerror or str(error)
        if os.path.lexists(path):  # also if it is a broken link
            report.fault(messages.spec.is_folder(shown, reason, _spec_in(path)), used)
        else:
            report.fault(messages.spec.no_such_path(shown, reason, path.name, _specs_beside(path)), used)
    except ValueError as error:  # a null byte in the name
        report.fault(messages.spec.cannot_be_read(shown, str(error)), used)
    return None


def _specs_beside(path: Path) -> list[str]:
    return [other.name for other in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []


def _spec_in(path: Path) -> str | None:
    """Return the path of the spec in a folder: `spec.yaml` of a saved model, or the only YAML file."""
    try:
        found = [name for name in os.listdir(path) if name.endswith(ENDINGS)]
    except OSError:
        return None
    name = "spec.yaml" if "spec.yaml" in found else found[0] if len(found) == 1 else None
    return str(path / name) if name else None


# --- checks shared by all sections of a spec -------------------------------------------------------------------------


def known_keys(
    report: Report, node: Mapping, known: Iterable[str], what: str, elsewhere: Container[str] = (), place: str = ""
) -> None:
    """Report unknown keys (E201) and mark a mapping that has any as incomplete.

    elsewhere: keys that belong in another place of a spec, which `place` describes.
    """
    words = tuple(known)
    for key, span, _ in node:
        if key not in words:
            node.incomplete = True
            report.fault(messages.spec.unknown_key(key, what, words, place if key in elsewhere else None), span)


class Holder(Protocol):
    """A mapping, or a step with its arguments."""

    incomplete: bool

    def get(self, key: str) -> Node | None: ...


def required(
    report: Callable[[Fault, Span | None], object],
    holder: Holder,
    key: str,
    missing: Callable[[], Fault],
    where: Span | None,
) -> Node | None:
    """Return the value of a key. If it is absent, report `missing()`, unless the holder is incomplete."""
    node = holder.get(key)
    if node is None and not holder.incomplete:
        report(missing(), where)
    return node


def is_name(report: Report, name: str, span: Span | None, key: bool = False) -> bool:
    """Return whether a word is a valid name; report it (E207, E311) if not. `key`: whether a colon could be missing."""
    if keyword.iskeyword(name):
        report.fault(messages.spec.reserved_word(name), span)
    elif not (name.isascii() and name.isidentifier()) or len(name) > 64:
        report.fault(messages.spec.not_a_name(name, key), span)
    else:
        return True
    return False


# --- reading a file ---------------------------------------------------------------------------------------------------


class _Found(Record):
    """A file in `use:`, with its name for messages, and its path relative to the folder of the spec."""

    path: Path
    shown: str
    relative: str
    kind: SourceKind


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
            text = root.text if isinstance(root, Scalar) else None
            self.report.fault(messages.spec.not_a_spec(kind_of(root), text, FILE_KEYS, VERSION), root.span)
            return None
        file = SpecFile(source, root)
        known_keys(self.report, root, FILE_KEYS, "a spec", MODEL_KEYS, "into `model:`")
        self._version(root)
        file.about = self._text(root, "about")
        file.let = self._mapping(root, "let")
        file.expect = self._mapping(root, "expect")
        if file.expect:
            known_keys(self.report, file.expect, EXPECT_KEYS, "expect")
        file.checkpoint = self._mapping(root, "checkpoint")
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
            text = node.text if isinstance(node, Scalar) else None
            self.report.fault(messages.spec.not_a_mapping(key, kind_of(node), text), node.span)
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

    def _text(self, root: Mapping, key: str) -> str:
        node = root.get(key)
        if node is None:
            return ""
        if isinstance(node, Scalar):
            return node.text
        self.report.fault(messages.spec.not_text(key, kind_of(node)), node.span)
        return ""

    def _version(self, root: Mapping) -> None:
        start = root.span._replace(end_line=root.span.line, end_column=root.span.column + 1)
        node = required(self.report.fault, root, "seqblocks", lambda: messages.spec.no_version(VERSION), start)
        if node and (not isinstance(node, Scalar) or node.value != VERSION or isinstance(node.value, bool)):
            self.report.fault(messages.spec.unknown_version(kind_of(node), VERSION), node.span)

    def _use(self, file: SpecFile, folder: str) -> None:
        node = file.root.get("use")
        if node is None:
            file.incomplete = file.root.incomplete
            return
        if not isinstance(node, Sequence):
            name = node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None
            self.report.fault(messages.spec.use_is_no_list(kind_of(node), name), node.span)
            file.incomplete = True
            return
        for item in node.items:
            if not isinstance(item, Scalar) or not isinstance(item.value, str):
                self.report.fault(messages.spec.not_a_file(kind_of(item)), item.span)
                file.incomplete = True
                continue
            other = self._used(item.value, item.span, folder)
            file.incomplete |= other is None or other.incomplete
            for name, block in (other.blocks if other else {}).items():
                clash = file.visible.get(name)
                if clash and clash is not block:
                    self.report.fault(messages.spec.block_of_two_files(name, clash.span, block.span), item.span)
                file.visible[name] = block

    def _needs(self, file: SpecFile) -> None:
        """Report missing plug-ins. Their verbs become UNKNOWN, so that they cause no follow-on errors."""
        node = file.root.get("needs")
        if node is None:
            return
        if not isinstance(node, Sequence):
            self.report.fault(messages.spec.needs_no_list(kind_of(node)), node.span)
            file.incomplete = True
            return
        for item in node.items:
            name = item.value if isinstance(item, Scalar) else None
            if not isinstance(name, str) or name.endswith(".py") or not re.fullmatch(_MODULE, name):
                stem = Path(name).stem if isinstance(name, str) and name.endswith(".py") else None
                self.report.fault(messages.spec.not_a_module(kind_of(item), stem), item.span)
                file.incomplete = True
            elif not self.has_plugin(name):
                self.report.fault(messages.spec.missing_plugin(name, partial(_file_of_plugin, name)), item.span)
                file.incomplete = True

    def _used(self, name: str, span: Span, folder: str) -> SpecFile | None:
        """Return a file in `use:`, read at its first use, or report an error and return None."""
        found = self._find(name, span, folder)
        if found is None:
            return None
        key = _absolute(found.path)
        if key in self.open:
            ring = map(os.path.basename, [*self.open[self.open.index(key) :], key])
            self.report.fault(messages.spec.files_in_a_ring(ring), span)
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
            self.report.fault(messages.spec.nothing_bundled(name, blocks), span)
            return None
        return _Found(found.get(name, Path(name)), f"<bundled {name}>", str(found.get(name, name)), "bundled")

    def _read_used(self, name: str, found: _Found, key: str, span: Span) -> SpecFile | None:
        if len(self.open) > MAX_USES:
            self.report.fault(messages.spec.use_too_deep(MAX_USES), span)
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
            self.report.fault(messages.spec.used_files_too_large(document.MAX_NODES), span)
            return None
        self.open.append(key)
        file = self.read(tree, source, os.path.dirname(found.relative))
        self.open.pop()
        return file

    def _text_in_use(self, name: str, relative: str, path: Path, shown: str, span: Span) -> str | None:
        """Return the text of a file in `use:`, or report an error and return None. Check permission before reading."""
        if self.provided is not None:
            if relative not in self.provided:
                self.report.fault(messages.spec.not_provided(name), span)
            return self.provided.get(relative)
        try:
            target = path.resolve()
            folders = [folder.resolve() for folder in (self.base, *self.allowed)]
        except (OSError, RuntimeError, ValueError) as error:  # circular links, a null byte
            self.report.fault(messages.spec.cannot_be_read(shown, str(error)), span)
            return None
        if not (name.endswith(ENDINGS) and target.name.endswith(ENDINGS)):
            self.report.fault(messages.spec.other_extension(name, name.endswith(ENDINGS), ENDINGS), span)
            return None
        if not any(target.is_relative_to(folder) for folder in folders):
            self.report.fault(messages.spec.outside_the_folders(name), span)
            return None
        if not os.path.lexists(path):
            self.report.fault(messages.spec.no_file(name, shown, path.name, partial(_specs_beside, path)), span)
            return None
        return read_text(target, shown, self.report, span)

    def _may_be_block(self, file: SpecFile, name: str, span: Span) -> bool:
        """Return whether a block may have this name; report it if not. Its uses are then UNKNOWN."""
        if not is_name(self.report, name, span):
            return False
        if self.is_builtin(name):
            self.report.fault(messages.spec.named_like_builtin(name), span)
            return False
        if clash := file.visible.get(name):
            self.report.fault(messages.spec.block_again(name, clash.span), span)
            return False
        return True

    def _is_mapping(self, name: str, node: Node) -> bool:
        if not isinstance(node, Mapping):
            self.report.fault(messages.spec.block_is_no_mapping(name, kind_of(node)), node.span)
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
        args = {a.name: a for k, s, n in given or () if (a := self._argument(k, s, n))}
        let = self._no_argument_again(let, args)
        names_in_block = {*args, *(let.entries if let else ())}
        for argument in args.values():
            self._plain_default(argument, names_in_block)
        steps = required(self.report.fault, node, "steps", lambda: messages.spec.block_without_steps(name), span)
        lists = [argument for argument in args.values() if isinstance(argument.default, Sequence)]
        run = verbs_in(steps) if lists else ()
        for argument in lists:
            argument.type = "steps" if argument.name in run else "any"
        names = self._mapping(node, "checkpoint")
        incomplete = given is not None and (given.incomplete or len(args) < len(given.entries))
        block = Block(name, span, file, self._text(node, "about"), args, let, steps, names, incomplete)
        file.blocks[name] = file.visible[name] = block

    def _no_argument_again(self, let: Mapping | None, args: dict[str, Argument]) -> Mapping | None:
        """Return `let:` of a block without entries that have the name of an argument, which are reported."""
        if let is None or not args.keys() & let.entries.keys():
            return let
        for name, span, _ in let:
            if name in args:
                self.report.fault(messages.spec.let_is_argument(name, args[name].span), span)
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
                other = block.home.visible.get(name)
                fault = messages.spec.steps_named_like_verb(name, other.span if other else None)
                self.report.fault(fault, argument.span)
            elif name not in run and block.steps and not nearest(name, unknown):  # a near match is a misspelt verb
                self.report.fault(messages.spec.steps_never_run(block.name, name), argument.span)

    def _plain_default(self, argument: Argument, names: Collection[str]) -> None:
        """Report a default that looks like an expression over other arguments."""
        node = argument.default
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            return
        if node.value.isidentifier() and not argument.by_depth:
            return
        if not has_syntax(node.value):
            return
        try:
            needed = {name for name, _ in parse(node.value).names}
        except Fault:  # not an expression, so a plain word
            return
        if needed.intersection(names) and needed <= {*names, DEPTH}:
            self.report.fault(messages.spec.default_is_expression(argument.name, node.value), node.span)
            argument.is_valid = False

    def _argument(self, name: str, span: Span, node: Node) -> Argument | None:
        if name in STEP_KEYS:
            self.report.fault(messages.spec.argument_is_step_key(name), span)
            return None
        if not is_name(self.report, name, span, key=True):
            return None
        if not isinstance(node, Scalar) or node.value is None:
            return Argument(name, "any", span, node)
        match node.value:
            case str() if node.value in ARGUMENT_TYPES:
                return Argument(name, node.value, span, None)
            case str() if suggestion := _nearest_type(node.value):
                fault = messages.spec.not_an_argument_type(node.value, ARGUMENT_TYPES, suggestion)
                self.report.fault(fault, node.span)
                return Argument(name, suggestion, span, None)
            case str() if _is_by_depth(node.value):
                return Argument(name, "int" if node.value == DEPTH else "float", span, node, by_depth=True)
            case bool():
                return Argument(name, "bool", span, node)
            case int():
                return Argument(name, "int", span, node)
            case float():
                return Argument(name, "float", span, node)
        return Argument(name, "word", span, node)


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


def _file_of_plugin(name: str) -> str | None:
    """Return the file with the name of a plug-in, if there is one."""
    file = f"{name.replace('.', os.sep)}.py"
    return file if os.path.isfile(file) else None


def _is_by_depth(text: str) -> bool:
    """Return whether a default is an expression whose only name is `depth`."""
    if DEPTH not in text or not has_syntax(text):
        return False
    try:
        return {name for name, _ in parse(text).names} == {DEPTH}
    except Fault:
        return False


STEP_KEYS = ("from", "as", "name", "init", "tie", "share", "when")


def _nearest_type(word: str) -> str | None:
    """Return the argument type that corresponds to a name from another language, such as `str`."""
    word = word.lower()
    return word if word in ARGUMENT_TYPES else _TYPES_ELSEWHERE.get(word)


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


def locate(spec: str | os.PathLike[str]) -> tuple[str, str, Path | None]:
    """Find a spec by path or bundled name. Return (text, name shown in messages, folder).

    Raises NoSpecError if there is no such spec or it cannot be opened, SpecError for a text that cannot be read, and
    UsageError if `spec` is not a string or path.
    """
    if not isinstance(spec, str | os.PathLike) or not isinstance(os.fspath(spec), str):
        kind = type(spec).__name__
        raise UsageError(
            f"expected a path or the name of a bundled spec, not {kind}; use load_text or build_text for text"
        )
    name = os.fspath(spec)
    report = Report()
    is_path = looks_like_path(name) or os.path.isfile(name)
    if is_path or (name not in bundled() and os.path.isdir(name)):
        path, shown = Path(name), name
    else:
        found = bundled()
        if name not in found:
            file = next((name + end for end in ENDINGS if os.path.isfile(name + end)), None)
            raise NoSpecError([messages.spec.no_bundled_spec(name, found, file).as_diagnostic(None)])
        path, shown = found[name], f"{name}.yaml"
    text = read_text(path, shown, report)
    if any(each.code == "E803" for each in report.diagnostics):
        raise NoSpecError(report.diagnostics)
    report.raise_if_any()
    assert text is not None
    return text, shown, path.parent
