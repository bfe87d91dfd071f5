"""Causal softmax attention, with an optional window, rotary positions and a cache of keys and values."""

from seqblocks.kernels.attention.between import attention_between
from seqblocks.kernels.attention.interface import AttentionState, FirstState, attention, attention_state
from seqblocks.kernels.attention.scores import alibi_slopes
from seqblocks.kernels.attention.selected import Choice, SelectedState, selected_attention

__all__ = [
    "AttentionState", "Choice", "FirstState", "SelectedState", "alibi_slopes", "attention", "attention_between",
    "attention_state", "selected_attention",
]
