"""Softmax attention over what went before, with an optional window, rotary positions and a cache of keys and values."""

from seqblocks.kernels.attention.interface import AttentionState, attention

__all__ = ["AttentionState", "attention"]
