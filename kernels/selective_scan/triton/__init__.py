"""The selective scan in Triton: one launch forward, one backward (a large batch takes several), and sums of the
backward's partial results.

A program owns BE channels of one sequence with all their states and walks along the tokens, from either end: no tensor
is flipped. dt's bias and softplus, the skip D u and the gate silu(z) are part of the walk. STEPS tokens are loaded
before the first of them is used, so that their latencies overlap.

The forward pass keeps the state before every CHUNK of tokens. The backward pass takes the chunks from the last to
the first, each in four steps that meet in a scratch, which stays in the cache: all that depends on a token and channel
alone; a walk that computes the chunk's states again, and the gradients from their outputs; the walk back of the adjoint
recurrence (see ../torch.py for the derivative); gradients of what the first step took. Sums over channels or sequences
are stored in parts and added afterwards, in an order that does not vary: results are the same bits in every run.

Arithmetic and states are float32 whatever the inputs are.
"""

from seqblocks.kernels.selective_scan.triton.launch import run

__all__ = ["run"]
