"""Define the verbs of the command line and their arguments, and report invalid ones with a hint."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from seqblocks._version import __version__
from seqblocks.cli import output
from seqblocks.errors import UsageError, visible
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

SPEC = "path of a spec, name of a bundled spec, or - for standard input"
DESIGN = (
    "path of a spec, name of a bundled spec, - for standard input, folder written by seqblocks.save or seqblocks try, "
    "or git:REV:PATH; may end with overrides, as in spec.yaml@dim=64@heads=4"
)


class Formatter(argparse.HelpFormatter):
    """Determine the width of the terminal without shutil, which imports three compression modules."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the lines of examples as they are."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


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
    """Raise UsageError with a hint instead of printing the usage and exiting."""

    def __init__(self, **more: Any) -> None:
        super().__init__(formatter_class=Formatter, **more)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else None
        raise UsageError(f"{visible(message)}{': ' + hint if hint else ''}\n{self.format_usage().rstrip()}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version to the stream of results. argparse itself would ignore write errors."""
        output.write(message.rstrip("\n"), None if file in (None, sys.stdout) else file)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Raises UsageError, or SystemExit after --help and --version."""
    _check_words(words)
    top = Parser(prog="seqblocks", description="Check YAML specs of sequence models, and build them.")
    version = f"seqblocks {__version__} (Python {sys.version.split()[0]})"
    top.add_argument("--version", action="version", version=version)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    first = words[0] if words else ""
    for name in [first] if first in VERBS else VERBS:  # creating the parsers of all verbs is slow
        verb = VERBS[name]
        declare(verbs.add_parser(name, help=verb.about, description=verb.about), verb)
    options, extra = top.parse_known_args(words)
    several = next((key for key in ("spec", "task", "run") if isinstance(getattr(options, key, None), list)), None)
    if several and not any(word.startswith("-") for word in extra):
        getattr(options, several).extend(extra)  # argparse does not collect positional arguments after an option
    elif extra:
        raise UsageError(_unknown_option(options.verb, extra[0]))
    return options


def declare(parser: Parser, verb: Verb) -> None:
    """Add the arguments of a verb to a parser."""
    for add in verb.arguments:
        add(parser)
    _common(parser, verb.formats)


# --- arguments of the verbs ---------------------------------------------------------------------------------------


def _common(parser: Parser, formats: Sequence[str]) -> None:
    group = parser.add_argument_group("common options")
    group.add_argument("--format", choices=formats, default="text", help="format of the output")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="use colours (auto respects NO_COLOR)"
    )
    group.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    group.add_argument(
        "-q", "--quiet", action="store_true",
        help="print nothing on success; compare, fit and sweep print their table",
    )  # fmt: skip


def _set(parser: Parser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a value of the spec")


def _overrides(parser: Parser) -> None:
    _set(parser)
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--stdin-filename", default="<stdin>", metavar="NAME", help="name shown for standard input in messages"
    )


def _use(parser: Parser) -> None:
    parser.add_argument(
        "--allow-use", action="append", default=[], metavar="DIR",
        help="also allow `use:` to read files below this folder, besides the folder of the spec",
    )  # fmt: skip


def _imports(parser: Parser) -> None:
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import a module or file.py that defines primitives; may be repeated",
    )  # fmt: skip


def _build(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=SPEC)
    parser.add_argument("--summary", action="store_true", help="show a table of the steps")
    parser.add_argument("--depth", type=count, metavar="N", help="maximum depth of the table")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="batch size used for the totals")
    parser.add_argument("--length", type=count, metavar="N", help="sequence length, if the spec does not fix it")
    parser.add_argument("--image-size", metavar="N", help="override the size of the input image (N, or HxW)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …; meta allocates no memory")
    parser.add_argument("--seed", type=_whole, default=0, help="seed of the initial weights")
    parser.epilog = (
        "examples:\n"
        "  seqblocks build vil_tiny --summary --depth 2\n"
        "  seqblocks build spec.yaml --set dim=32 --summary --length 1024 --dtype bfloat16"
    )


def _bench(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=DESIGN)
    mode = parser.add_mutually_exclusive_group()
    mode.set_defaults(mode="forward")
    for name, what in (("forward", "a pass without gradients (the default)"), ("train", "a pass forward and backward"),
                       ("step", "a token of a stream")):  # fmt: skip
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=f"time {what}")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="batch size")
    about = "tokens of a pass, or after which a stream begins again (default: 256)"
    parser.add_argument("--length", type=count, metavar="N", help=about)
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of torch (default: one per core)")
    parser.add_argument("--seconds", type=_seconds, default=5.0, metavar="S", help="how long to measure (default: 5)")
    parser.epilog = (
        "examples:\n"
        "  seqblocks bench mamba_small\n"
        "  seqblocks bench spec.yaml@dim=256 --train --batch 8 --length 1024\n"
        "  seqblocks bench spec.yaml --step --threads 1 --format json > today.json"
    )


def _convert(parser: Parser) -> None:
    parser.add_argument(
        "path", metavar="DIR", help="a checkpoint saved by seqblocks.save, or weights in another layout"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="LAYOUT",
        help="output layout: seqblocks, gguf (for llama.cpp), or one that the spec defines, such as official or hub",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder (gguf: file); must not exist yet")
    parser.add_argument(
        "--type", choices=("f32", "f16", "q8_0"), help="gguf: type of the matrices (default: f32)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="gguf: folder with a tokenizer.json (default: no tokenizer)")
    parser.add_argument(
        "--spec", metavar="SPEC", help="path or bundled name; required if DIR does not contain the spec"
    )
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="maximum size of a file: 5GB, 500MB, …")
    parser.epilog = (
        "examples:\n"
        "  seqblocks convert mamba-130m-hf --spec mamba_130m --to seqblocks --out mamba\n"
        "  seqblocks convert my_model --to hub --out my_model_hub"
    )


def _draw(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=SPEC)
    parser.add_argument("--html", metavar="FILE", help="a page with boxes that fold, which loads nothing; - for stdout")
    parser.add_argument("--svg", metavar="FILE", help="a picture for a paper or a page")
    parser.add_argument("--mermaid", metavar="FILE", help="a flowchart for Mermaid")
    parser.add_argument("--dot", metavar="FILE", help="a digraph for Graphviz")
    parser.add_argument("--depth", type=count, metavar="N", help="levels of boxes (default: all)")
    parser.epilog = (
        "examples:\n"
        "  seqblocks draw hybrid_small --html hybrid.html\n"
        "  seqblocks draw spec.yaml --depth 3 --svg - > spec.svg"
    )


def _probe(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=DESIGN)
    parser.add_argument(
        "task", nargs="*", default=[], metavar="TASK",  # with a default, argparse does not call it missing
        help="parity, modular, s3, a5, s5, recall, induction, copying, in-context-recall, noisy-recall, fuzzy-recall, "
        "selective-copying, compression, memorization, long-copying, adding, repeat-first, repeat-previous, t-maze, "
        "image-rows, image-columns (default: parity, recall, copying)",
    )  # fmt: skip
    parser.add_argument(
        "--preset", choices=("quick", "paper"), default="quick",
        help="paper: the sizes, lengths and steps of the publication, for a GPU, with its figures (default: quick)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="trainings of each task (default: 1)")
    parser.add_argument("--steps", type=count, metavar="N", help="steps of each training (default: the task's)")
    parser.add_argument(
        "--lr", type=_rates, metavar="R[,R...]",
        help="highest learning rate; of several, each is tried (default: the task's)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="limit of each training, which is then marked *")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, …")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture of the accuracy against the length")
    parser.epilog = (
        "examples:\n"
        "  seqblocks probe mlstm_small parity recall --seeds 3 --plot accuracy.svg\n"
        "  seqblocks probe spec.yaml compression noisy-recall --set vocabulary=32 --seconds 60\n"
        "  seqblocks probe spec.yaml induction --lr 1e-3,3e-3,1e-2 --seeds 3 --steps 2000\n"
        "  seqblocks probe images.yaml image-rows image-columns\n"
        "  seqblocks probe spec.yaml noisy-recall --set vocabulary=32 --preset paper --device cuda --format json"
    )


def _try(parser: Parser) -> None:
    parser.add_argument("spec", nargs="?", metavar="SPEC", help=DESIGN)
    parser.add_argument("--text", metavar="FILE", help="learn the bytes of a file, by predicting the next one")
    parser.add_argument("--npz", metavar="FILE", help="learn arrays: x (inputs) and y (class numbers, or numbers)")
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="how long to learn (default: 3)")
    parser.add_argument("--steps", type=count, metavar="N", help="learn until there are so many steps in all")
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--resume", metavar="DIR", help="continue a run exactly where its checkpoint is")
    parser.add_argument("--batch", type=count, metavar="N", help="sequences of a step (default: 16)")
    parser.add_argument("--length", type=count, metavar="N", help="bytes of a sequence (default: 256)")
    parser.add_argument("--lr", type=_rate, metavar="R", help="learning rate after a warm-up (default: 0.003)")
    parser.add_argument("--seed", type=_whole, metavar="N", help="of weights and batches (default: 0)")
    parser.add_argument("--device", help="cpu, cuda, … (default: cuda if there is one)")
    parser.epilog = (
        "examples:\n"
        "  seqblocks try spec.yaml --text book.txt\n"
        "  seqblocks try spec.yaml --text book.txt --steps 500 --out runs/first\n"
        "  seqblocks try --resume runs/first --steps 1000\n"
        "  seqblocks report runs/first runs/second --html page.html\n\n"
        "It shows whether a model learns. Train with Lightning, torchtitan or transformers' Trainer."
    )


def _report(parser: Parser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="folder of a run of `seqblocks try`")
    parser.add_argument("--html", metavar="FILE", help="the page (default of one run: RUN/report.html); - prints it")
    parser.epilog = "examples:\n  seqblocks report runs/first\n  seqblocks report runs/* --html runs.html"


def _serve(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="path of a spec, or name of a bundled spec (which is not saved)")
    parser.add_argument("--port", type=_whole, default=0, metavar="N", help="port (default: any that is free)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--static", metavar="DIR",
        help="write the page into a folder instead, with Python for the browser, which npm and pip fetch; any server "
        "of files can publish it",
    )  # fmt: skip
    parser.epilog = (
        "examples:\n"
        "  seqblocks serve spec.yaml --open\n"
        "  seqblocks serve spec.yaml --static site"
    )


def _export(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=f"{SPEC}, or a folder written by seqblocks.save")
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("--onnx", metavar="FILE", help="export to ONNX; requires pip install 'seqblocks[onnx]'")
    file.add_argument("--pt2", metavar="FILE.pt2", help="export a program for torch.export.load")
    file.add_argument("--aoti", metavar="FILE.pt2", help="compile to machine code; requires a C++ compiler")
    graph = parser.add_mutually_exclusive_group()
    graph.set_defaults(graph="forward")
    graph.add_argument("--step", dest="graph", action="store_const", const="step", help="process one token of a stream")
    graph.add_argument("--chunk", dest="graph", action="store_const", const="chunk", help="process a chunk of a stream")
    graph.add_argument(
        "--context", dest="graph", action="store_const", const="context",
        help="compute the initial state from the inputs that do not stream",
    )  # fmt: skip
    parser.add_argument(
        "--weights", metavar="PATH", help="a checkpoint saved by seqblocks.save, or weights in another layout"
    )
    parser.add_argument("--batch", default="dynamic", metavar="N", help="batch size, or dynamic (the default)")
    parser.add_argument(
        "--length", default="dynamic", metavar="N", help="number of tokens per call, or dynamic (the default)"
    )
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64")
    parser.add_argument("--seed", type=_whole, default=0, help="seed of the initial weights, if --weights is not given")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=None,
        help="compare the result with the model (the default; for ONNX, requires onnxruntime)",
    )  # fmt: skip
    parser.epilog = (
        "examples:\n"
        "  seqblocks export mamba_small --onnx step.onnx --step\n"
        "  seqblocks export my_model --pt2 model.pt2 --batch 1"
    )


def _check(parser: Parser) -> None:
    parser.add_argument("spec", nargs="+", metavar="SPEC", help=SPEC)
    parser.add_argument(
        "--graph", action="store_true",
        help="with --format json: also the steps and references, as far as they are known in an invalid spec",
    )  # fmt: skip
    parser.epilog = (
        "examples:\n"
        "  seqblocks check spec.yaml\n"
        "  seqblocks check specs/*.yaml --strict --format github\n"
        "  seqblocks check spec.yaml --set dim=96 --format json --graph"
    )


def _ops(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a verb, FILE.yaml::BLOCK, or FILE.yaml")
    parser.epilog = (
        "examples:\n"
        "  seqblocks ops\n"
        "  seqblocks ops mlstm\n"
        "  seqblocks ops blocks.yaml::memory --format json"
    )


def _show(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=SPEC)
    parser.add_argument(
        "--stage", choices=("document", "spec", "graph", "steps", "plan"),
        help="document: the YAML with positions; spec: blocks, arguments, steps; graph: shapes, lookahead, parameters; "
        "steps: the same without numbers, equal layers as one, for git diff; "
        "plan: which kernel each step would use on a CPU (seqblocks explain: on any device)",
    )  # fmt: skip
    parser.add_argument("--source", action="store_true", help="print the YAML of a bundled spec")
    parser.epilog = (
        "examples:\n"
        "  seqblocks show spec.yaml --stage graph\n"
        "  seqblocks show spec.yaml --stage steps --set dim=32\n"
        "  seqblocks show mamba_small --source > mine.yaml"
    )


def _schema(parser: Parser) -> None:
    parser.add_argument(
        "--for", dest="spec", metavar="SPEC", help="include the blocks of this spec and of the files it uses"
    )
    parser.epilog = "examples:\n  seqblocks schema > seqblocks.schema.json\n  seqblocks schema --for spec.yaml"


def _new(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the model; the file is NAME.yaml")
    parser.add_argument("--like", metavar="MODEL", help="copy a bundled model instead (seqblocks list)")
    parser.epilog = "examples:\n  seqblocks new first\n  seqblocks new tiny_mamba --like mamba_small"


def _spec(parser: Parser) -> None:
    parser.add_argument("path", metavar="DIR", help="a folder of the Hugging Face Hub, or its config.json")
    parser.add_argument("--out", metavar="FILE", help="write the spec to a new file")
    parser.epilog = "examples:\n  seqblocks spec Llama-3.2-1B --out llama.yaml"


def _list(parser: Parser) -> None:
    parser.epilog = "examples:\n  seqblocks list\n  seqblocks list --format json"


def _lsp(parser: Parser) -> None:
    parser.add_argument("--log", metavar="FILE", help="append what the server does, and its faults, to a file")
    parser.epilog = "examples:\n  seqblocks lsp\n  seqblocks lsp --import my_ops --log lsp.log"


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.epilog = (
        "examples:\n"
        "  seqblocks completion bash > ~/.local/share/bash-completion/completions/seqblocks\n"
        "  seqblocks completion zsh > ~/.zfunc/_seqblocks  # a folder of $fpath\n"
        "  seqblocks completion fish > ~/.config/fish/completions/seqblocks.fish"
    )


def _explain(parser: Parser) -> None:
    parser.add_argument("what", metavar="CODE|SPEC", help="a code such as E401, or a spec")
    parser.add_argument("--dtype", default="float32", help="dtype of the model")
    parser.add_argument("--device", help="cpu (the default), cuda, …; the device need not be present")
    parser.add_argument(
        "--arch", help="GPU architecture, which determines the tile sizes: sm_90 (the default), gfx942, …"
    )
    parser.epilog = (
        "examples:\n"
        "  seqblocks explain E401\n"
        "  seqblocks explain mamba_small --device cuda --dtype bf16"
    )


Arguments = Callable[[Parser], None]


class Verb(Record):
    """The description of a verb, and a function that adds its arguments to a parser."""

    about: str
    arguments: tuple[Arguments, ...] = ()
    formats: tuple[str, ...] = ("text", "json", "github")


CHECK = ("text", "json", "github", "markdown")
TABLES = ("text", "json", "markdown", "csv")


def _design(verb: str) -> Arguments:
    """Return what declares the arguments of a tool for choosing among designs; it imports their module when it runs."""

    def add(parser: Parser) -> None:
        from seqblocks.cli import design_arguments

        getattr(design_arguments, verb)(parser)

    return add


VERBS = {
    "bench": Verb(
        "time each step of a model beside the least time that this machine needs",
        (_overrides, _use, _imports, _bench),
    ),
    "build": Verb("build a model and show its steps", (_overrides, _use, _imports, _build)),
    "check": Verb("check specs, without importing torch", (_overrides, _use, _imports, _check), CHECK),
    "compare": Verb("compare the figures of specs", (_overrides, _use, _imports, _design("compare")), TABLES),
    "completion": Verb("print a script that completes commands in a shell", (_completion,), ("text",)),
    "convert": Verb("convert weights to another layout", (_set, _imports, _convert)),
    "diff": Verb(
        "print how one spec differs from another", (_overrides, _use, _imports, _design("diff")), ("text", "json")
    ),
    "draw": Verb("draw a spec, without importing torch", (_overrides, _use, _imports, _draw)),
    "export": Verb("export a model to ONNX or torch.export", (_overrides, _use, _imports, _export)),
    "fit": Verb("choose values that meet a budget", (_overrides, _use, _imports, _design("fit")), TABLES),
    "list": Verb("list the bundled specs", (_list,)),
    "lsp": Verb("serve an editor, which starts this command itself", (_use, _imports, _lsp)),
    "memory": Verb(
        "estimate the memory of training and inference", (_overrides, _use, _imports, _design("memory")), TABLES
    ),
    "new": Verb("write a commented spec to start from", (_new,), ("text", "json")),
    "ops": Verb("list the verbs of the language, or describe one", (_use, _imports, _ops)),
    "show": Verb(
        "show a spec at one stage of the analysis, or the YAML of a bundled spec", (_overrides, _use, _imports, _show)
    ),
    "probe": Verb("train a spec on small synthetic tasks", (_overrides, _use, _imports, _probe)),
    "report": Verb("write a page about runs of `seqblocks try`", (_report,), ("text", "json")),
    "serve": Verb(
        "edit a spec in a page of the browser, with its picture, counts and problems", (_use, _imports, _serve)
    ),
    "spec": Verb("print the spec of weights from the Hugging Face Hub", (_spec,), ("text", "json")),
    "sweep": Verb("check a spec at every point of a grid", (_use, _imports, _design("sweep")), (*TABLES, "html")),
    "schema": Verb("print a JSON schema for editors", (_overrides, _use, _imports, _schema)),
    "try": Verb("let a spec learn for a few minutes", (_overrides, _use, _imports, _try), ("text", "json")),
    "explain": Verb(
        "explain an error code, or show which kernels a model would use", (_overrides, _use, _imports, _explain)
    ),
}


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would put the name of this function into the message
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _positive(text: str, limit: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= limit:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}, above 0 and at most {limit:,}")
    return value


def _rate(text: str) -> float:
    return _positive(text, 10, "a learning rate")


def _rates(text: str) -> list[float]:
    return [_rate(each) for each in text.split(",")]


def _minutes(text: str) -> float:
    return _positive(text, 10_000, "a number of minutes")


def _seconds(text: str) -> float:
    return _positive(text, 86_400, "a number of seconds")


def count(text: str) -> int:
    value = _whole(text)
    if not 1 <= value <= 10**9:  # the limit of specs; totals of larger numbers would overflow a float
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000,000")
    return value


# --- unknown words and options ------------------------------------------------------------------------------------


def _check_words(words: Sequence[str]) -> None:
    """Raise UsageError for a missing or unknown verb, a wrong dash, an empty word, or an option before the verb."""
    dashes = next((w for w in words if w.startswith(("–", "—", "−"))), None)
    if dashes:
        raise UsageError(
            f"'{visible(dashes)}' begins with a different dash character; options begin with two hyphens: --"
        )
    if not words:
        width = max(map(len, VERBS))
        lines = (f"  {name:<{width}}  {verb.about}" for name, verb in VERBS.items())
        raise UsageError("\n".join(["a verb is missing:", *lines, "`seqblocks VERB --help` lists what it takes"]))
    first = words[0]
    if first.startswith("-") and not any(own.startswith(first) for own in ("-h", "--help", "--version")):
        hint = _near(first, ("--help", "--version")) or "options follow the verb, as in `seqblocks list -q`"
        raise UsageError(f"seqblocks itself has no option {visible(first)}: {hint}")
    verb = next((w for w in words if not w.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        hint = did_you_mean(verb, VERBS) or f"the verbs are {', '.join(VERBS)}"
        raise UsageError(f"there is no verb '{visible(verb)}': {hint}")
    for before, word in pairwise(words):
        if not word or re.fullmatch(r"--[\w-]+=", word):  # else it would count as left out
            name = visible(word or before).rstrip("=")
            what = f"{name} has no value" if name.startswith("-") else f"the argument after {name} is empty"
            raise UsageError(f"{what}: is a variable of the shell not set?")


def _unknown_option(verb: str, word: str) -> str:
    helps = f"`seqblocks {verb} --help` lists what {verb} takes"
    if not word.startswith("-"):
        return f"unexpected argument '{visible(word)}'; {helps}"
    name = visible(word.partition("=")[0])
    options = {each: _options(each) for each in VERBS}
    others = [other for other, known in options.items() if name in known]
    if others:
        return f"{verb} has no option {name}, but {' and '.join(others)} {'has' if len(others) == 1 else 'have'}"
    letters = [known for known in options[verb] if known.startswith(f"-{name}")] if len(name) == 2 else []
    hint = f"did you mean '{letters[0]}'?" if len(letters) == 1 else _near(name, options[verb])
    return f"{verb} has no option {name}: {hint or helps}"


def _options(verb: str) -> list[str]:
    """Return the long options of a verb."""
    parser = Parser()
    declare(parser, VERBS[verb])
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _near(option: str, known: Iterable[str]) -> str | None:
    """Return a `did_you_mean` hint for an option, compared without the leading dashes."""
    hint = did_you_mean(option.lstrip("-"), [name.lstrip("-") for name in known])
    return hint and hint.replace("'", "'--", 1)
