"""`seqblocks VERB …`: arguments in, exit status out.

0 good · 1 the spec is at fault · 2 the command is · 3 an `expect:` is not met · 4 something needed is absent or full ·
70 a fault of ours. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any, ClassVar, NoReturn, cast

from seqblocks._version import __version__
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli import entry as entry  # scripts of earlier installations look for it here
from seqblocks.errors import SeqblocksError, SpecError, UsageError, visible
from seqblocks.language.vocabulary import did_you_mean

VERBS = {
    "build": "prove a spec, build it, and show what it is made of",
    "check": "prove specs without torch",
    "list": "the bundled specs",
    "ops": "the verbs of the language, or all about one",
    "show": "a spec at any stage, or the YAML of a bundled one",
    "schema": "a JSON schema for editors",
    "explain": "all about an error code, or which kernels a spec would run and why",
}
INTERNAL = 70
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """Errors that say what to type, as exceptions."""

    verbs: ClassVar[dict[str, _Parser]] = {}

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else None
        raise UsageError(f"{visible(message)}{': ' + hint if hint else ''}\n{self.format_usage().rstrip()}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version go where results go; argparse drops an error there."""
        output.write(message.rstrip("\n"), None if file in (None, sys.stdout) else file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse has it, but what is not known is told here, where the options of the verb are at hand."""
        options, extra = super().parse_known_args(args, namespace)
        if isinstance(getattr(options, "spec", None), list) and not any(word.startswith("-") for word in extra):
            options.spec += extra  # specs behind an option, which argparse does not take
            extra = []
        verb = next((name for name, parser in self.verbs.items() if parser is self), None)
        if extra and verb:
            raise UsageError(self._unknown(verb, extra[0]))
        return options, extra

    def names(self) -> list[str]:
        """The long options."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _unknown(self, verb: str, word: str) -> str:
        helps = f"`seqblocks {verb} --help` tells what {verb} takes"
        if not word.startswith("-"):
            return f"there is a word too many: '{visible(word)}'; {helps}"
        name = visible(word.partition("=")[0])
        letters = [known for known in self.names() if known.startswith(f"-{name}")] if len(name) == 2 else []
        hint = f"did you mean '{letters[0]}'?" if len(letters) == 1 else _near(name, self.names())
        others = [other for other, parser in self.verbs.items() if name in parser.names()]
        if others:
            return f"{verb} has no option {name}, but {' and '.join(others)} {'has' if len(others) == 1 else 'have'}"
        return f"{verb} has no option {name}: {hint or helps}"


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    common = _Parser(add_help=False)
    group = common.add_argument_group("common options")
    group.add_argument("--format", choices=("text", "json", "github"), default="text", help="how results are printed")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours (NO_COLOR counts)")
    group.add_argument("--traceback", action="store_true", help="show Python's traceback with an error")
    group.add_argument("-q", "--quiet", action="store_true", help="print nothing when all is well")
    spec = _Parser(add_help=False)
    spec.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a value by its name")
    spec.add_argument("--stdin-filename", default="<stdin>", metavar="NAME", help="what `-` is called in messages")

    use = _Parser(add_help=False)
    use.add_argument(
        "--allow-use", action="append", default=[], metavar="DIR",
        help="let the spec's `use:` read files below this folder too, not only below its own",
    )
    plug = _Parser(add_help=False)
    plug.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module, or a file.py, of your own that defines primitives; may be given several times",
    )

    top = _Parser(prog="seqblocks", description="A YAML spec says what a sequence model is; seqblocks proves it.")
    top.add_argument("--version", action="version", version=_version())
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, *parents: _Parser) -> _Parser:
        made = verbs.add_parser(name, help=VERBS[name], description=VERBS[name], parents=[*parents, common])
        _Parser.verbs[name] = made
        return made

    one = "path of a spec, name of a bundled one, or - for standard input"
    build = verb("build", spec, use, plug)
    build.add_argument("spec", metavar="SPEC", help=one)
    build.add_argument("--summary", action="store_true", help="show a table of its steps")
    build.add_argument("--depth", type=_count, metavar="N", help="levels of the table")
    build.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences, for the totals")
    build.add_argument("--length", type=_count, metavar="N", help="tokens of a sequence, where the spec is open")
    build.add_argument("--image-size", metavar="N", help="another size of the input image (N, or HxW)")
    build.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    build.add_argument("--device", default="cpu", help="cpu, cuda, …; meta allocates nothing")
    build.add_argument("--seed", type=_whole, default=0, help="of the initial weights")
    check = verb("check", spec, use, plug)
    check.add_argument("spec", nargs="+", metavar="SPEC", help=one)
    verb("list")
    ops = verb("ops", use, plug)
    ops.add_argument("name", nargs="?", metavar="NAME", help="a verb, FILE.yaml::BLOCK, or FILE.yaml")
    show = verb("show", spec, use, plug)
    show.add_argument("spec", metavar="SPEC", help=one)
    show.add_argument(
        "--stage", choices=("document", "spec", "graph", "plan"),
        help="document: the YAML with positions; spec: blocks, arguments, steps; graph: shapes and parameters; "
        "plan: which kernel each step would use on a CPU (seqblocks explain: on any device)",
    )  # fmt: skip
    show.add_argument("--source", action="store_true", help="print the YAML of a bundled spec, to start your own from")
    schema = verb("schema", spec, use, plug)
    schema.add_argument("--for", dest="spec", metavar="SPEC", help="know the blocks of this spec and what it uses")
    explain = verb("explain", spec, use, plug)
    explain.add_argument("what", metavar="CODE|SPEC", help="a code such as E401, or a spec")
    explain.add_argument("--dtype", default="float32", help="of the model")
    explain.add_argument("--device", help="cpu (the default), cuda, …; it need not be here")
    explain.add_argument("--arch", help="of the GPU, for the size of tiles: sm_90 (the default), gfx942, …")
    return top


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would show the name of this function
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _count(text: str) -> int:
    value = _whole(text)
    if not 1 <= value <= 10**9:  # as in a spec; beyond, totals leave what a float can hold
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000,000")
    return value


def _version() -> str:
    return f"seqblocks {__version__} (Python {sys.version.split()[0]})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    try:
        _known_verb(words)
        options = parser().parse_args(words)
    except (UsageError, output.Unwritable) as error:
        return _report(error, None)
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    try:
        return _run(options)
    except SeqblocksError as error:
        return _report(error, options)
    except BrokenPipeError:
        return _broken_pipe()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:  # SystemExit too: a primitive that ends the program must not end it well
        return _internal(error, options)


def _run(options: argparse.Namespace) -> int:
    if getattr(options, "imports", None):
        from seqblocks.cli import imports

        imports.run(options)
    # each verb's room is opened only when it is asked for: `check` must not pay for tables, nor for torch
    if options.verb == "check":
        from seqblocks.cli import check

        return check.run(options)
    if options.verb == "build":
        from seqblocks.cli import build

        return build.run(options)
    if options.verb == "explain":
        from seqblocks.cli import explain

        return explain.run(options)
    from seqblocks.cli import info

    status: int = getattr(info, options.verb)(options)
    return status


def _near(option: str, known: Iterable[str]) -> str | None:
    """`did_you_mean` for options: dashes, which all have, make nothing alike."""
    hint = did_you_mean(option.lstrip("-"), [name.lstrip("-") for name in known])
    return hint and hint.replace("'", "'--", 1)


def _known_verb(words: Sequence[str]) -> None:
    dashes = next((w for w in words if w.startswith(("–", "—", "−"))), None)
    if dashes:
        raise UsageError(f"'{visible(dashes)}' begins with another dash; an option begins with two of these: --")
    first = words[0] if words else ""
    if first.startswith("-") and not any(own.startswith(first) for own in ("-h", "--help", "--version")):
        hint = _near(first, ("--help", "--version")) or "options come behind the verb, as in `seqblocks list -q`"
        raise UsageError(f"{visible(first)} is no option of seqblocks itself: {hint}")
    verb = next((w for w in words if not w.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        hint = did_you_mean(verb, VERBS) or f"the verbs are {', '.join(VERBS)}"
        raise UsageError(f"there is no verb '{visible(verb)}': {hint}")


def _report(error: SeqblocksError, options: Any) -> int:
    """Say what is wrong; returns the exit status."""
    if options is not None and options.traceback:
        _traceback(error)
    if isinstance(error, SpecError):
        output.diagnostics(error, options)
    else:
        output.problem(str(error), None if isinstance(error, output.Unwritable) else options)
    return error.exit_status


def _internal(error: BaseException, options: argparse.Namespace) -> int:
    if options.traceback:
        _traceback(error)
    from seqblocks.cli import imports

    theirs = imports.failed_primitive(error)
    if theirs:
        output.problem(theirs, options)
        return UsageError.exit_status
    output.problem(
        f"internal error ({type(error).__name__}: {error}).\n"
        f"This is a fault of seqblocks {__version__}, not of yours. Please report it with the spec and the command;\n"
        "--traceback shows where it happened.",
        options,
    )
    return INTERNAL


def _traceback(error: BaseException) -> None:
    import traceback

    output.write("".join(traceback.format_exception(error)).rstrip("\n"), output.stderr())


def _broken_pipe() -> int:
    output.silence(output.stdout())
    return BROKEN_PIPE


def process() -> NoReturn:
    """`main` in a process of its own, which it ends.

    Collecting garbage and taking modules apart at exit would take a quarter of the time of `check`.
    """
    gc.disable()
    sys.stdin, sys.stdout, sys.stderr = (  # what was closed when we were called is None here
        stream or open(os.devnull, mode)  # noqa: SIM115  # for as long as the process lives
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    _results_apart()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them reads every installed package
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, on import; nothing here needs it
    if "build" in sys.argv[1:2]:
        gc.enable()
    status = main()
    try:
        output.stdout().flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except OSError as error:
        output.silence(output.stdout())
        status = _report(output.Unwritable(error), None)
    for stream in (sys.stdout, output.stderr()):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # remarks that nobody can read change nothing
            stream.flush()
    if sys.gettrace() is None:
        os._exit(status)
    sys.exit(status)


def _results_apart() -> None:
    """Keep standard output for results: what plug-ins and their children print there goes to standard error."""
    try:
        results = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a stream is closed, or there are none
        return
    output.results = open(  # noqa: SIM115  # for as long as the process lives
        results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )
    output.remarks = sys.stderr
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
