"""A training step of a model on a `Tape`, in the order in which the modules of `seqblocks/runtime` run it."""

from seqblocks.architect.replay import loops, tokens  # noqa: F401 - they register how their nodes are recorded
from seqblocks.architect.replay.losses import MOMENTS
from seqblocks.architect.replay.steps import Replay, Sizes

__all__ = ["MOMENTS", "Replay", "Sizes"]
