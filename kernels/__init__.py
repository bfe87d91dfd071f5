"""Kernels: plain functions on tensors, usable without YAML.

Each has up to three implementations with one signature (reference, torch, Triton); `dispatch` selects one of them.
"""

from seqblocks.kernels.associative_scan import Memoroid, associative_scan
from seqblocks.kernels.attention import AttentionState, attention
from seqblocks.kernels.causal_conv import causal_conv
from seqblocks.kernels.centaurus import centaurus
from seqblocks.kernels.dispatch import BACKENDS, Verdict, fallbacks, same_backend, use_backend, why
from seqblocks.kernels.gated_recurrence import gated_recurrence
from seqblocks.kernels.head_norm import head_norm
from seqblocks.kernels.headwise_linear import headwise_linear
from seqblocks.kernels.linear_attention import linear_attention
from seqblocks.kernels.mlstm import MLSTMState, mlstm, mlstm_init_state, mlstm_step
from seqblocks.kernels.mlstm.memoroid import MLSTMElement, mlstm_algebra, mlstm_memoroid
from seqblocks.kernels.positions import packed_resets, rotary
from seqblocks.kernels.residual_norm import residual_norm
from seqblocks.kernels.selective_scan import selective_scan
from seqblocks.kernels.slstm import SLSTMState, slstm

__all__ = [
    "BACKENDS",
    "AttentionState",
    "MLSTMElement",
    "MLSTMState",
    "Memoroid",
    "SLSTMState",
    "Verdict",
    "associative_scan",
    "attention",
    "causal_conv",
    "centaurus",
    "fallbacks",
    "gated_recurrence",
    "head_norm",
    "headwise_linear",
    "linear_attention",
    "mlstm",
    "mlstm_algebra",
    "mlstm_init_state",
    "mlstm_memoroid",
    "mlstm_step",
    "packed_resets",
    "residual_norm",
    "rotary",
    "same_backend",
    "selective_scan",
    "slstm",
    "use_backend",
    "why",
]
