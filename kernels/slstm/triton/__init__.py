"""The sLSTM in Triton: one launch for all tokens forward; one backward, and a product for the recurrent weights.

A program processes one head of 16 sequences and loops over the tokens, because each needs the outputs of the one
before. There are three methods, between which `tiles` in launch.py chooses:

- whole heads (`scan`): if the four matrices of the head fit on chip, they stay there, and the states in registers.
- teams (`scan_by_team`, teams.py): a wider head is shared by a team of programs. Each has a slice of the channels; they
  exchange their outputs and synchronise at each token.
- tiles (`scan_by_tiles`): if no team fits, one program processes the channels tile by tile. Matrices are read from the
  L2 cache at each token, and states and outputs go through memory that only this program uses, with a barrier between
  tokens.

If there will be a backward pass, the forward pass saves c, n, m and the four gates of every token. The derivative is
that of the definition, including the stabiliser (see ../torch.py). Gradients of the gates are stored; those of the
matrices are one product of these with the outputs of the previous tokens.

Gates, states and sums are float32. Dots use bfloat16 if all gates are bfloat16. float16, whose range a gradient may
exceed, is converted to tf32, which has as many digits, rounding to nearest. float32 stays float32. Matrices are
transposed by loading them in another order.
"""

from seqblocks.kernels.slstm.triton.launch import run

__all__ = ["run"]
