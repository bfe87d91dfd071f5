"""Print what a machine has before anything runs there: versions, what can be imported, GPU, compilers, free space."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable

MODULES = (
    "torch", "triton", "pytest", "xdist", "hypothesis", "einops", "yaml", "rich", "numpy", "pydantic",
    "seqblocks.kernels", "mlstm_kernels", "fla", "mamba_ssm", "causal_conv1d", "flashrnn",
)
DISTRIBUTIONS = {"xdist": "pytest-xdist", "yaml": "pyyaml", "fla": "flash-linear-attention"}
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit,mig.mode.current"


def imported(name: str) -> str:
    """Return the version of a module that can be imported, or why it cannot."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return "missing"
    try:
        importlib.import_module(name)
    except Exception as error:  # an installation may be broken in any way
        return reason(error)
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "yes"


def reason(error: Exception) -> str:
    return f"no ({type(error).__name__}: {''.join(str(error).splitlines()[:1])})"


def output(*command: str) -> str:
    """Return the first lines of what a command prints, or why it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return reason(error)
    return " / ".join((done.stdout or done.stderr).strip().splitlines()[:4])


def ptxas() -> str:
    from seqblocks.kernels import triton_common

    if triton_common.MISSING:
        return triton_common.MISSING
    refused = triton_common.refused_ptxas()
    tool = importlib.import_module("triton").knobs.nvidia.ptxas
    return f"{tool.version} {tool.path} {refused}".rstrip()


def cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"not available (torch was built for {torch.version.cuda})"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.version.cuda}, {torch.cuda.get_device_name()}, sm_{major}{minor}"


def attempt(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        return reason(error)


def main() -> None:
    free = shutil.disk_usage(".").free / 2**30
    print(f"python {platform.python_version()}, {os.cpu_count()} processors, {free:.0f} GB free here")
    print("; ".join(f"{name} {imported(name)}" for name in MODULES))
    print(f"CUDA {attempt(cuda)}; ptxas {attempt(ptxas)}")
    print(f"nvidia-smi: {output('nvidia-smi', f'--query-gpu={QUERY}', '--format=csv,noheader')}")
    print(f"compute-sanitizer: {output('compute-sanitizer', '--version')}; cuobjdump: {shutil.which('cuobjdump')}")


if __name__ == "__main__":
    main()
