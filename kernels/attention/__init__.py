"""Causal softmax attention, with an optional window, rotary positions and a cache of keys and values."""

from seqblocks.kernels.attention.interface import AttentionState, attention, attention_state

__all__ = ["AttentionState", "attention", "attention_state"]
