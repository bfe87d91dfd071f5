"""Gated linear recurrence of channels: h = e^decay h + x."""

from seqblocks.kernels.gated_recurrence.interface import gated_recurrence

__all__ = ["gated_recurrence"]
