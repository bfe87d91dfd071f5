"""The command line's grammar: verbs, their arguments, and messages that say what to type instead."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from seqblocks._version import __version__
from seqblocks.cli import output
from seqblocks.errors import UsageError, visible
from seqblocks.language.vocabulary import did_you_mean

SPEC = "path of a spec, name of a bundled one, or - for standard input"


class Formatter(argparse.HelpFormatter):
    """Finds out how wide the terminal is by itself: argparse imports shutil for it, and so three compressors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    try:
        return int(os.environ["COLUMNS"]) or 80
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class Parser(argparse.ArgumentParser):
    """Raises UsageError with a hint where argparse would print its usage and exit."""

    def __init__(self, **more: Any) -> None:
        super().__init__(formatter_class=Formatter, **more)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else None
        raise UsageError(f"{visible(message)}{': ' + hint if hint else ''}\n{self.format_usage().rstrip()}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version where results go. argparse drops an error of writing there."""
        output.write(message.rstrip("\n"), None if file in (None, sys.stdout) else file)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the words of a command. Raises UsageError, or SystemExit after --help and --version."""
    _check_words(words)
    top = Parser(prog="seqblocks", description="Check the YAML spec of a sequence model, and build it.")
    version = f"seqblocks {__version__} (Python {sys.version.split()[0]})"
    top.add_argument("--version", action="version", version=version)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    first = words[0] if words else ""
    for name in [first] if first in VERBS else VERBS:  # a parser takes time, and nothing reads those of other verbs
        about, add_arguments = VERBS[name]
        _declare(verbs.add_parser(name, help=about, description=about), add_arguments)
    options, extra = top.parse_known_args(words)
    if isinstance(getattr(options, "spec", None), list) and not any(word.startswith("-") for word in extra):
        options.spec += extra  # specs that follow an option, which argparse does not collect
    elif extra:
        raise UsageError(_unknown_option(options.verb, extra[0]))
    return options


def _declare(parser: Parser, add_arguments: Sequence[Arguments]) -> None:
    for add in add_arguments:
        add(parser)
    _common(parser)


# --- the arguments of the verbs -----------------------------------------------------------------------------------


def _common(parser: Parser) -> None:
    group = parser.add_argument_group("common options")
    group.add_argument("--format", choices=("text", "json", "github"), default="text", help="how results are printed")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours (NO_COLOR counts)")
    group.add_argument("--traceback", action="store_true", help="show Python's traceback with an error")
    group.add_argument("-q", "--quiet", action="store_true", help="print nothing when all is well")


def _set(parser: Parser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a value by its name")


def _overrides(parser: Parser) -> None:
    _set(parser)
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--stdin-filename", default="<stdin>", metavar="NAME", help="what `-` is called in messages")


def _use(parser: Parser) -> None:
    parser.add_argument(
        "--allow-use", action="append", default=[], metavar="DIR",
        help="let the spec's `use:` read files below this folder too, not only below its own",
    )  # fmt: skip


def _imports(parser: Parser) -> None:
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module, or a file.py, of your own that defines primitives; may be given several times",
    )  # fmt: skip


def _build(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=SPEC)
    parser.add_argument("--summary", action="store_true", help="show a table of its steps")
    parser.add_argument("--depth", type=_count, metavar="N", help="levels of the table")
    parser.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences, for the totals")
    parser.add_argument("--length", type=_count, metavar="N", help="tokens of a sequence, where the spec is open")
    parser.add_argument("--image-size", metavar="N", help="another size of the input image (N, or HxW)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …; meta allocates nothing")
    parser.add_argument("--seed", type=_whole, default=0, help="of the initial weights")


def _convert(parser: Parser) -> None:
    parser.add_argument("path", metavar="DIR", help="what seqblocks.save wrote, or weights of others")
    parser.add_argument("--to", required=True, metavar="LAYOUT", help="official, hub, … (of the spec), or seqblocks")
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder that does not exist yet")
    parser.add_argument("--spec", metavar="SPEC", help="path or bundled name; needed where DIR does not say it")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a file, at most: 5GB, 500MB, …")


def _export(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=f"{SPEC}, or a folder that seqblocks.save wrote")
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("--onnx", metavar="FILE", help="write ONNX; needs pip install 'seqblocks[onnx]'")
    file.add_argument("--pt2", metavar="FILE.pt2", help="write a program that torch.export.load reads")
    file.add_argument("--aoti", metavar="FILE.pt2", help="compile to machine code, with a C++ compiler")
    graph = parser.add_mutually_exclusive_group()
    graph.set_defaults(graph="forward")
    graph.add_argument("--step", dest="graph", action="store_const", const="step", help="one token of a stream")
    graph.add_argument("--chunk", dest="graph", action="store_const", const="chunk", help="some tokens of a stream")
    graph.add_argument(
        "--context", dest="graph", action="store_const", const="context",
        help="the state before the first token, from the inputs that do not stream",
    )  # fmt: skip
    parser.add_argument("--weights", metavar="PATH", help="what seqblocks.save wrote, or weights of others")
    parser.add_argument("--batch", default="dynamic", metavar="N", help="sequences of a call, or dynamic (the default)")
    parser.add_argument("--length", default="dynamic", metavar="N", help="tokens of a call, or dynamic (the default)")
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64")
    parser.add_argument("--seed", type=_whole, default=0, help="of the initial weights, without --weights")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=None,
        help="compare with the model (the default; ONNX: where onnxruntime is installed)",
    )  # fmt: skip


def _check(parser: Parser) -> None:
    parser.add_argument("spec", nargs="+", metavar="SPEC", help=SPEC)


def _ops(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a verb, FILE.yaml::BLOCK, or FILE.yaml")


def _show(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=SPEC)
    parser.add_argument(
        "--stage", choices=("document", "spec", "graph", "plan"),
        help="document: the YAML with positions; spec: blocks, arguments, steps; graph: shapes, lookahead, parameters; "
        "plan: which kernel each step would use on a CPU (seqblocks explain: on any device)",
    )  # fmt: skip
    parser.add_argument("--source", action="store_true", help="print the YAML of a bundled spec, to copy and change")


def _schema(parser: Parser) -> None:
    parser.add_argument("--for", dest="spec", metavar="SPEC", help="know the blocks of this spec and what it uses")


def _explain(parser: Parser) -> None:
    parser.add_argument("what", metavar="CODE|SPEC", help="a code such as E401, or a spec")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--device", help="cpu (the default), cuda, …; the device need not be present")
    parser.add_argument("--arch", help="of the GPU, for the size of tiles: sm_90 (the default), gfx942, …")


Arguments = Callable[[Parser], None]


class Verb(NamedTuple):
    """What a verb does, and what adds its arguments to a parser."""

    about: str
    arguments: tuple[Arguments, ...] = ()


VERBS = {
    "build": Verb("check a spec, build it, and show its steps", (_overrides, _use, _imports, _build)),
    "check": Verb("check specs without torch", (_overrides, _use, _imports, _check)),
    "convert": Verb("write weights in another layout", (_set, _imports, _convert)),
    "export": Verb("export a model as ONNX, or as a program of torch", (_overrides, _use, _imports, _export)),
    "list": Verb("list the bundled specs"),
    "ops": Verb("list the verbs of the language, or describe one", (_use, _imports, _ops)),
    "show": Verb("show a spec at any stage, or the YAML of a bundled one", (_overrides, _use, _imports, _show)),
    "schema": Verb("print a JSON schema for editors", (_overrides, _use, _imports, _schema)),
    "explain": Verb("explain an error code, or which kernels a spec would run", (_overrides, _use, _imports, _explain)),
}


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would show the name of this function
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _count(text: str) -> int:
    value = _whole(text)
    if not 1 <= value <= 10**9:  # as in a spec; totals of larger numbers do not fit a float
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000,000")
    return value


# --- words that the grammar does not know -------------------------------------------------------------------------


def _check_words(words: Sequence[str]) -> None:
    """Raise UsageError for a wrong dash, an option before the verb, or an unknown verb."""
    dashes = next((w for w in words if w.startswith(("–", "—", "−"))), None)
    if dashes:
        raise UsageError(f"'{visible(dashes)}' begins with another dash; an option begins with two of these: --")
    first = words[0] if words else ""
    if first.startswith("-") and not any(own.startswith(first) for own in ("-h", "--help", "--version")):
        hint = _near(first, ("--help", "--version")) or "options follow the verb, as in `seqblocks list -q`"
        raise UsageError(f"seqblocks itself has no option {visible(first)}: {hint}")
    verb = next((w for w in words if not w.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        hint = did_you_mean(verb, VERBS) or f"the verbs are {', '.join(VERBS)}"
        raise UsageError(f"there is no verb '{visible(verb)}': {hint}")


def _unknown_option(verb: str, word: str) -> str:
    helps = f"`seqblocks {verb} --help` lists what {verb} takes"
    if not word.startswith("-"):
        return f"there is a word too many: '{visible(word)}'; {helps}"
    name = visible(word.partition("=")[0])
    options = {each: _options(each) for each in VERBS}
    others = [other for other, known in options.items() if name in known]
    if others:
        return f"{verb} has no option {name}, but {' and '.join(others)} {'has' if len(others) == 1 else 'have'}"
    letters = [known for known in options[verb] if known.startswith(f"-{name}")] if len(name) == 2 else []
    hint = f"did you mean '{letters[0]}'?" if len(letters) == 1 else _near(name, options[verb])
    return f"{verb} has no option {name}: {hint or helps}"


def _options(verb: str) -> list[str]:
    """The long options of a verb."""
    parser = Parser()
    _declare(parser, VERBS[verb].arguments)
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _near(option: str, known: Iterable[str]) -> str | None:
    """`did_you_mean` for options, without the dashes that all of them share."""
    hint = did_you_mean(option.lstrip("-"), [name.lstrip("-") for name in known])
    return hint and hint.replace("'", "'--", 1)
