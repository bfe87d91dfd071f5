"""The sLSTM: a scalar memory per channel, exponential gates and recurrent connections within each head."""

from seqblocks.kernels.slstm.interface import SLSTMState, slstm

__all__ = ["SLSTMState", "slstm"]
