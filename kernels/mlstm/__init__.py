"""The mLSTM: a matrix memory with exponential or sigmoid input gate (arXiv:2405.04517; sigmoid: arXiv:2503.14376)."""

from seqblocks.kernels.mlstm.interface import MLSTMState, mlstm, mlstm_init_state, mlstm_step

__all__ = ["MLSTMState", "mlstm", "mlstm_init_state", "mlstm_step"]
