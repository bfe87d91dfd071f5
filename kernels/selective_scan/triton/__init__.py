"""The selective scan in Triton: one launch forward, one backward (several for a large batch), and sums of the
backward pass's partial results.

A program loops over the tokens of one sequence, from either end so that no tensor is flipped, with BE channels and all
their states. The bias and softplus of dt, the skip D u and the gate silu(z) are fused. STEPS tokens are loaded before
the first of them is used, so that their latencies overlap.

The forward pass saves the state before every CHUNK of tokens. The backward pass processes the chunks from last to
first. Each takes four steps, which share a scratch buffer in the cache:

1. Compute everything that depends only on a token and channel.
2. Recompute the states of the chunk, and the gradients that come from its outputs.
3. Run the adjoint recurrence backwards (see ../torch.py for the derivative).
4. Compute the gradients of the inputs of step 1.

Partial sums over channels or sequences are stored and added afterwards in a fixed order: results are bitwise
reproducible. Arithmetic and states are float32 for all input dtypes.
"""

from seqblocks.kernels.selective_scan.triton.launch import run

__all__ = ["run"]
