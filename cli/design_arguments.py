"""Define the arguments of the tools for choosing among designs. Each function has the name of its verb."""

from __future__ import annotations

import argparse

from seqblocks.cli.arguments import DESIGN, count
from seqblocks.errors import visible


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", nargs="+", metavar="SPEC", help=DESIGN)
    parser.add_argument(
        "--length", dest="lengths", type=_lengths, default=(), metavar="N[,N…]",
        help="also count MACs per token in sequences of these lengths",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="dtype in which sizes are counted")
    parser.epilog = _examples(
        "compare mamba_130m transformer_125m --length 128,1024",
        "compare spec.yaml spec.yaml@dim=128 spec.yaml@dim=128@blocks.memory.heads=8",
        "compare git:HEAD~1:spec.yaml spec.yaml --format markdown",
        "compare *.yaml --set let.vocabulary=32000 --format csv > designs.csv",
    )


def diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=DESIGN)
    parser.add_argument("second", metavar="B", help="another, or the same with other overrides")
    parser.add_argument("--weights", action="store_true", help="also compare the weights of two saved models")
    parser.add_argument("--html", metavar="FILE", help="write a page instead, which loads nothing; - for stdout")
    parser.add_argument("--exit-code", action="store_true", help="return status 1 if A and B differ")
    parser.add_argument("--dtype", default="float32", help="dtype in which sizes are counted")
    parser.epilog = _examples(
        "diff spec.yaml spec.yaml@dim=128",
        "diff git:HEAD:spec.yaml spec.yaml --exit-code",
        "diff runs/a runs/b --weights",
        "diff mamba_130m mamba_370m --format json",
        "diff git:HEAD:spec.yaml spec.yaml --html diff.html",
    )


def fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=DESIGN)
    parser.add_argument(
        "--solve", action="append", required=True, metavar="PATH=VALUES",
        help="an option to choose, with its values: FIRST..LAST:STEP or a list; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--to", action="append", required=True, metavar="TARGET",
        help="params=125M (as near as possible), 'state_bytes<=2MB' (a limit); may be repeated",
    )  # fmt: skip
    parser.add_argument("--top", type=count, default=5, metavar="N", help="number of candidates to show (default: 5)")
    parser.add_argument("--length", type=count, metavar="N", help="sequence length, if the spec does not fix it")
    parser.add_argument("--dtype", default="float32", help="dtype in which sizes are counted")
    parser.add_argument("--exhaustive", action="store_true", help="check every point of the grid")
    parser.add_argument(
        "--write", metavar="FILE", help="write the spec with the best values to this file; all else stays as it is"
    )
    parser.epilog = _examples(
        "fit mamba_130m --solve dim=256..2560:64 --solve depth=8..64:4 --to params=370M",
        "fit spec.yaml --solve dim=64..1024:16 --to params=1.3M --to 'state_bytes<=20kB' --write small.yaml",
        "fit spec.yaml --solve dim=64..4096:64 --to flops_per_token=250M --length 1024 --format json",
        figures=True,
    )


def sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=DESIGN)
    parser.add_argument(
        "--set", dest="grid", action="append", required=True, metavar="PATH=VALUES",
        help="an option with its values: FIRST..LAST:STEP or a list; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--where", action="append", default=[], metavar="LIMIT",
        help="leave out designs that do not meet it, as in 'params<200M'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--length", dest="lengths", type=_lengths, default=(), metavar="N[,N…]",
        help="count MACs per token in sequences of these lengths; training FLOPs at the first",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="dtype in which sizes are counted")
    parser.add_argument(
        "--tokens-per-parameter", type=_positive, default=20.0, metavar="N",
        help="tokens of a training run for each parameter (default: 20, as for Chinchilla)",
    )  # fmt: skip
    parser.add_argument(
        "--ladder", type=_budgets, default=(), metavar="FLOPS[,FLOPS…]",
        help="show only the designs nearest to these budgets of training FLOPs, with the tokens that they afford",
    )  # fmt: skip
    parser.add_argument(
        "--probe", action="append", default=[], metavar="TASK", help="train each design on a task of `seqblocks probe`"
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="trainings of each probe (default: 1)")
    parser.add_argument("--steps", type=count, metavar="N", help="steps of each training (default: the task's)")
    parser.add_argument("--bench", choices=("forward", "train", "step"), help="time each design, as `seqblocks bench`")
    parser.add_argument("--seconds", type=_positive, metavar="S", help="how long to time each design (default: 1)")
    parser.add_argument(
        "--pareto", metavar="COLUMN,COLUMN…",
        help="mark designs that none beats in these columns (default: params and what is measured)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="keep rows as JSON lines; a sweep that was interrupted continues")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument(
        "--stdin-filename", default="<stdin>", metavar="NAME", help="name shown for standard input in messages"
    )
    parser.set_defaults(set=[])
    parser.epilog = _examples(
        "sweep transformer_small --set dim=64..256:64 --set depth=2,4,8 --length 1024",
        "sweep spec.yaml --set dim=256..2048:64 --where 'params<200M' --out sweep.jsonl --format csv > sweep.csv",
        "sweep spec.yaml --set dim=128..2048:64 --length 1024 --ladder 1e16,1e17,1e18",
        "sweep spec.yaml --set heads=1,2,4 --probe recall --bench step",
    )


def memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help=DESIGN)
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences of a step (default: 1)")
    parser.add_argument("--length", type=count, metavar="N", help="tokens of a sequence, if the spec does not fix it")
    parser.add_argument(
        "--optimizer", choices=("adamw", "momentum", "sgd"), default="adamw",
        help="AdamW (the default), SGD with or without momentum",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="float32", help="of the weights, activations, gradients and the optimiser's state"
    )
    parser.add_argument(
        "--checkpoint", choices=("none", "blocks"), default="none",
        help="blocks: compute the layers of `repeat` again in the backward pass",
    )  # fmt: skip
    parser.add_argument("--fits", metavar="SIZE", help="status 1 if the peak is above this, as in 24GB or 512MiB")
    parser.add_argument("--depth", type=count, default=2, metavar="N", help="depth of the table (default: 2)")
    parser.epilog = _examples(
        "memory transformer_small --batch 8 --length 1024",
        "memory mamba_130m --batch 8 --length 2048 --dtype bf16 --checkpoint blocks --fits 24GB",
        "memory vil_tiny --batch 64 --format json",
    )


def _examples(*lines: str, figures: bool = False) -> str:
    text = "examples:\n" + "\n".join(f"  seqblocks {line}" for line in lines)
    if not figures:
        return text
    from seqblocks.architect.facts import FACTS

    names = [name for name in FACTS if name != "streams"]
    half = len(names) // 2
    return f"figures:\n  {', '.join(names[:half])},\n  {', '.join(names[half:])}\n\n{text}"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{visible(text)}' is not a positive number")
    return value


def _budgets(text: str) -> tuple[float, ...]:
    return tuple(map(_positive, text.split(",")))


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part[:12]) <= 10**9 for part in parts):
        message = f"'{visible(text)}' is not a list of whole numbers from 1 to 1,000,000,000, such as 1024,8192"
        raise argparse.ArgumentTypeError(message)
    return tuple(map(int, parts))
