"""Import transformers, or raise an error that names the extra to install."""

from __future__ import annotations

from seqblocks.errors import UnavailableError

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UnavailableError("seqblocks.hf needs an extra: pip install 'seqblocks[hub]'") from None

__all__ = ["transformers"]
