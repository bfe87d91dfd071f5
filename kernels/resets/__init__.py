"""Resets: tokens before a reset affect nothing after it, neither values nor gradients.

Forward passes mask the carried state where a sequence begins. Multiplying by 0 is not enough: 0 times NaN or inf is
NaN. The same holds for derivatives: if a sequence overflowed and no loss reads it, the incoming gradients are zero, but
the local derivatives are NaN. Its gradients must be exactly zero, and those of other sequences must be unaffected.

tokens.py: masks, and `dead_tokens`, the tokens of sequences that no gradient reaches. Kernels with a hand-written
derivative, in Triton and in torch, mask these tokens; this works under compilers and transforms too.

contained.py: the same for functions that autograd differentiates, such as the reference implementations. **Only in
eager reverse mode**: under torch.compile, torch.export, torch.func and forward mode the values are right, but gradients
of nonfinite dead tokens are NaN.

nonfinite.py: for matrix products over a chunk, which mix sequences before anything can be masked (the mLSTM), and for
compiled scans. Tokens with a nonfinite input are replaced by zeros, and everything that depends on them is set to NaN
afterwards. A sequence that overflows from finite inputs is not detected; the stabilised mLSTM cannot overflow that way.

nonfinite_triton.py: the same for the Triton kernels of the mLSTM and of linear attention, behind a flag on the device.

B batch, S sequence. resets [B, S] bool: true where a token is the first of a new sequence, in scan order.
"""

from seqblocks.kernels.resets.contained import SHARED, STATE, TOKENS, Gate, contained, gated
from seqblocks.kernels.resets.tokens import along, backward_marks, dead_tokens, finite, reset_times, where_true

__all__ = [
    "SHARED", "STATE", "TOKENS", "Gate", "along", "backward_marks", "contained", "dead_tokens", "finite", "gated",
    "reset_times", "where_true",
]  # fmt: skip
