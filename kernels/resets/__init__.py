"""What a reset promises: nothing before it reaches anything after it, in values and in gradients.

Forward passes mask the carried state where a sequence begins. A product with 0 would not do: 0 times NaN or inf is NaN.
The same product is in every derivative: a sequence that overflowed and that no loss reads receives gradients of zero,
and its local derivatives are NaN. Its gradients must be exactly zero, and no other sequence's may be touched.

tokens.py: masks, and `dead_tokens`: those of sequences that no gradient reaches. Kernels with a written derivative, in
Triton and in torch, mask these; that holds under compilers and transforms too.

contained.py: the same for functions that autograd differentiates, as the references are. **Only in eager reverse
mode**: under torch.compile, torch.export, torch.func and forward mode values are right, but gradients of a dead token
that is not finite are NaN.

nonfinite.py: for products of matrices over a chunk, which mix sequences before anything can be masked (the mLSTM), and
for scans that are compiled. Tokens with an input that is not finite become zeros; what depends on them becomes NaN
again. It does not see a sequence that overflows although its inputs are finite, which the stabilised mLSTM rules out.

B batch, S sequence. resets [B, S] bool: true where a token is the first of a new sequence, in the order of the scan.
"""

from seqblocks.kernels.resets.contained import SHARED, STATE, TOKENS, Gate, contained, gated
from seqblocks.kernels.resets.tokens import along, backward_marks, dead_tokens, finite, reset_times, where_true

__all__ = [
    "SHARED", "STATE", "TOKENS", "Gate", "along", "backward_marks", "contained", "dead_tokens", "finite", "gated",
    "reset_times", "where_true",
]  # fmt: skip
