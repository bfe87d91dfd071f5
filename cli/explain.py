"""`seqblocks explain`: describe an error code, or which kernels a spec would run and why."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from seqblocks._version import __version__
from seqblocks.analysis.check import require_model
from seqblocks.analysis.steps.steps import files_of_blocks
from seqblocks.cli import output
from seqblocks.cli.check import load
from seqblocks.cli.imports import import_torch
from seqblocks.combinators import COMBINATORS
from seqblocks.cost import dtype_named
from seqblocks.errors import UnavailableError, UsageError, quote, visible
from seqblocks.language.spec_files import bundled, looks_like_path
from seqblocks.op import builtin_verbs
from seqblocks.suggestions import did_you_mean, nearest

if TYPE_CHECKING:
    from seqblocks.graph import ModelSpec
    from seqblocks.runtime.kernel_report import KernelUse, ProductUse


def run(options: argparse.Namespace) -> int:
    """Explain an error code; treat any other argument as a spec. Raises UsageError for a verb."""
    name = options.what
    if re.fullmatch(r"[A-Za-z]\d{1,4}", name, re.ASCII):
        return code(options)
    if name not in bundled() and not looks_like_path(name) and not os.path.exists(name):
        _check_no_verb(name)
    return kernels(options)


def _check_no_verb(name: str) -> None:
    """Raise UsageError for the name of a verb, or a word that is closer to one than to a bundled model."""
    verbs = [*COMBINATORS, *builtin_verbs(), *files_of_blocks()]
    if name in verbs:
        raise UsageError(f"{name} is a verb, and explain takes a spec or a code: `seqblocks ops {name}` describes it")
    models = (spec for spec, path in bundled().items() if path.parent.name == "models")
    near = nearest(name, [*models, *verbs])
    if near in verbs:
        what = f"there is no spec {quote(name)}, and explain takes a spec or a code"
        raise UsageError(f"{what}: did you mean the verb {near}? `seqblocks ops {near}` describes it")


def code(options: argparse.Namespace) -> int:
    """Print the meaning of a code, with an example and its fix."""
    from seqblocks.cli.codes import CODES, text

    name = options.what.upper()
    if name not in CODES:
        hint = did_you_mean(name, CODES) or f"the codes are {', '.join(CODES)}"
        raise UsageError(f"there is no code {options.what}: {hint}")
    if options.format == "json":
        output.dump({"code": name, **CODES[name]._asdict()})
    else:
        output.write(text(name))
    return 0


def kernels(options: argparse.Namespace) -> int:
    """Print, for each step with a kernel, the implementation for the device, its tile sizes, and why none is faster."""
    dtype = dtype_named(options.dtype, "--dtype")
    arch = "sm_90" if options.arch is None else options.arch
    if not re.fullmatch(r"sm_\d+|gfx\w+", arch, re.ASCII):
        raise UsageError(f"--arch takes an architecture such as sm_90 or gfx942, not {arch!r}")
    model = require_model(*load(options.what, options))
    device = _device(import_torch("the kernels need torch"), options.device or ("cuda" if options.arch else "cpu"))
    if options.arch and device != "cuda":
        raise UsageError(f"--arch {arch} is a GPU architecture, but --device is {device}")
    return show_plan(model, options.what, options, device, dtype, arch)


def show_plan(
    model: ModelSpec,
    spec: str,
    options: argparse.Namespace,
    device: str = "cpu",
    dtype: str = "float32",
    arch: str = "sm_90",
) -> int:
    """Print the kernel that each step would use; return the exit status. Raises UnavailableError without torch."""
    torch = import_torch("the kernels need torch")
    from seqblocks.kernels.dispatch import requested
    from seqblocks.runtime.kernel_report import kernel_uses, product_uses

    steps = kernel_uses(model, device, getattr(torch, dtype), arch)
    products = product_uses(model, device, getattr(torch, dtype))
    unsupported = [step for step in steps if step.implementation is None]
    if options.format == "json":
        facts = {"version": __version__, "ok": not unsupported, "spec": spec, "device": device, "dtype": dtype}
        facts |= {"arch": arch, "backend": requested(), "steps": [s.as_data() for s in steps]}
        facts |= {"products": [each.as_data() for each in products]}
        output.dump(facts | output.remarks_on(model))
    elif not options.quiet:
        where = f"{device} ({arch})" if device == "cuda" else device
        output.write(f"{visible(model.name)} on {where} in {dtype}, backend {requested()}")
        _table(steps, requested())
        if device == "cpu":
            _products(products)
    return UnavailableError.exit_status if unsupported else 0


def _counted(names: list[str]) -> str:
    """Return one path for steps that are alike, and how many they are."""
    from seqblocks.runtime.kernel_report import common_pattern

    return f"{common_pattern(names)} ({len(names)} x)" if len(names) > 1 else names[0]


def _products(products: list[ProductUse]) -> None:
    """Print which product each matrix is multiplied by, unless all are torch's."""
    if not any(each.fbgemm_max_tokens or {name for _, name in each.products} != {"torch"} for each in products):
        output.write("all matrix products are torch's")
        return
    output.write("products of each matrix by itself, by the number of tokens")
    sizes = [f"{each.rows} x {each.columns}" for each in products]
    names = [_counted(each.names) for each in products]
    for name, size, each in zip(names, sizes, products, strict=True):
        ranges = ", ".join(f"{by} from {tokens}" if tokens > 1 else by for tokens, by in each.products)
        if each.fbgemm_max_tokens:
            ranges += f"; in streams FBGEMM up to {each.fbgemm_max_tokens}"
        output.write(f"{name:<{max(map(len, names))}}  {size:<{max(map(len, sizes))}}  {ranges}")


def _device(torch: Any, name: str) -> str:
    try:
        return str(torch.device(name).type)
    except RuntimeError:
        raise UsageError(f"--device {visible(name)} is not a device: cpu, cuda, mps, …") from None


def _table(steps: list[KernelUse], backend: str) -> None:
    if not steps:
        output.write("no step uses a kernel")
        return
    names = [_counted(step.names) for step in steps]
    wide = max(map(len, names))
    kernel = max(len(step.kernel) for step in steps)
    printed: set[str] = set()
    for name, step in zip(names, steps, strict=True):
        output.write(f"{name:<{wide}}  {step.kernel:<{kernel}}  {step.implementation or 'cannot run'}".rstrip())
        longest = max(map(len, step.tiles), default=0)
        for phase, tile in step.tiles.items():
            output.write(f"    {phase:<{longest}}  {' '.join(f'{key}={value}' for key, value in tile.items())}")
        remarks = (
            step.reasons()
            if step.implementation
            else [f"{v.implementation}: {v.reason}" for v in step.verdicts if backend in ("auto", v.implementation)]
        )
        for remark in remarks:
            text = remark if remark not in printed else f"{remark.partition(':')[0]}: as above"
            printed.add(remark)
            output.write(f"    {text}")
