"""Define the arguments of the tools for choosing among designs. Each function has the name of its verb."""

from __future__ import annotations

import argparse

from seqblocks.errors import visible

DESIGN = (
    "path of a spec, name of a bundled spec, - for standard input, folder written by seqblocks.save, or git:REV:PATH; "
    "may end with overrides, as in spec.yaml@dim=64@heads=4"
)


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


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  seqblocks {line}" for line in lines)


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part[:12]) <= 10**9 for part in parts):
        message = f"'{visible(text)}' is not a list of whole numbers from 1 to 1,000,000,000, such as 1024,8192"
        raise argparse.ArgumentTypeError(message)
    return tuple(map(int, parts))
