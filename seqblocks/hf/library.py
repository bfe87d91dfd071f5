"""Import transformers, or raise an error that names what to install; and the names that its versions differ in."""

from __future__ import annotations

from seqblocks.errors import UnavailableError

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UnavailableError("seqblocks.hf needs an extra: pip install 'seqblocks[hub]'") from None

LATEST = (5, 24)  # the latest version that the tests of seqblocks.hf ran with


def check_version(version: str) -> None:
    """Raise UnavailableError for a version of transformers that is later than those tested."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) > LATEST:
        latest, after = "{}.{}".format(*LATEST), f"{LATEST[0]}.{LATEST[1] + 1}"
        what = f"seqblocks.hf is tested with transformers up to {latest}, and {version} is installed"
        untested = "loading and saving, `generate` with the state as its cache, the Trainer's loss and weight decay"
        raise UnavailableError(f"{what}. Untested: {untested}. Type: pip install 'transformers<{after}'")


check_version(transformers.__version__)

from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402 - after the check of the version

# The name of the cache in arguments and outputs: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

__all__ = ["CACHE", "transformers"]
