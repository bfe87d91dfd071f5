"""Run functions on several ranks, which are gloo processes on a CPU, and the command line that starts them.

Each function is called with its rank and a folder that all ranks share. Its return value or exception is the result of
that rank.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TIMEOUT = 300  # seconds, after which a rank that still waits for another is terminated


def run_ranks(script: Path, names: list[str], folder: Path, ranks: int = 2) -> dict[str, list[Any]]:
    """Run functions of a script on that many ranks. Return by name the result of each rank, or the text of its error.
    """
    import torch

    command = [sys.executable, __file__, str(script), str(folder), str(ranks), ",".join(names)]
    children = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [child.communicate(timeout=TIMEOUT)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(child.returncode for child in children), "\n".join(outputs)
    found = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: [results[name] for results in found] for name in found[0]}


def _main(script: str, folder: str, ranks: str, names: str, rank: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks)
    )
    spec = importlib.util.spec_from_file_location("on_ranks", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results: dict[str, Any] = {}
    for name in names.split(","):
        try:
            results[name] = getattr(module, name)(int(rank), Path(folder))
        except Exception:
            results[name] = traceback.format_exc()
            break  # other ranks may be waiting for this one
    torch.save(results, Path(folder) / f"results-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
