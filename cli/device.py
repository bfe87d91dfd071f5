"""The device that `--device` names, for commands that compute on it."""

from __future__ import annotations

import argparse
from typing import Any

from seqblocks.errors import UnavailableError, UsageError, visible


def device_of(options: argparse.Namespace, torch: Any) -> Any:
    """Return the device of --device, by default a GPU if there is one.

    Raises UnavailableError if it is not there, UsageError if it computes nothing.
    """
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch knows the device, which is not there
        raise UnavailableError(f"--device {visible(options.device)}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UsageError("--device meta computes nothing, so there is nothing to train or to time on it")
    return device
