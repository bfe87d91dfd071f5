"""Causal softmax attention, with an optional window, rotary positions and a cache of keys and values."""

from seqblocks.kernels.attention.between import attention_between
from seqblocks.kernels.attention.interface import AttentionState, FirstState, attention, attention_state
from seqblocks.kernels.attention.scores import alibi_slopes

__all__ = ["AttentionState", "FirstState", "alibi_slopes", "attention", "attention_between", "attention_state"]
