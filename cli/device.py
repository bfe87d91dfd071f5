"""The device that `--device` names, for commands that compute on it."""

from __future__ import annotations

import argparse
from typing import Any

from seqblocks.errors import UnavailableError, UsageError, visible


def device_of(options: argparse.Namespace, torch: Any) -> Any:
    """Return the device of --device, by default a GPU if there is one.

    Raises UnavailableError if it is not there, UsageError if it computes nothing.
    """
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch knows the device, which is not there
        reason = (str(error).splitlines() or ["it cannot be used"])[0]
        hint = "" if options.device else ". --device cpu computes without it"
        raise UnavailableError(f"--device {visible(name)}: {reason}{hint}") from None
    if device.type == "meta":
        raise UsageError("--device meta computes nothing, so there is nothing to train or to time on it")
    return device
