"""The device that `--device` names, for commands that compute on it."""

from __future__ import annotations

import argparse
from typing import Any

from seqblocks.errors import UnavailableError, UsageError, visible


def device_of(options: argparse.Namespace, torch: Any) -> Any:
    """Return the device of --device, by default a GPU if there is one.

    Raises UnavailableError if it is not there, UsageError if there is no such device or if it computes nothing.
    """
    from seqblocks.runtime.arguments import reason

    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {visible(name)} is not a device: name cpu, cuda, cuda:1, mps, …") from None
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "" if options.device else ". --device cpu computes without it"
        raise UnavailableError(f"--device {visible(name)}: {reason(error)}{hint}") from None
    if device.type == "meta":
        raise UsageError("--device meta computes nothing, so there is nothing to train or to time on it")
    return device
