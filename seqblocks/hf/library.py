"""transformers, or a message that names the extra where it is absent."""

from __future__ import annotations

from seqblocks.errors import UnavailableError

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UnavailableError("seqblocks.hf needs an extra: pip install 'seqblocks[hub]'") from None

__all__ = ["transformers"]
