"""The sLSTM in Triton: all tokens in one launch forward, and backward in one and a product for the recurrent weights.

A program owns a head of 16 sequences and walks along the tokens, because each needs the outputs of the one before.
There are three ways; `tiles` in launch.py chooses.

- whole.py: where the head's four matrices fit on chip they stay there, and the states in registers.
- teams.py: wider heads are shared by a team of programs, a slice of the channels each, which exchange their outputs at
  each token and wait for one another.
- blocks.py: what no team fits goes by blocks of channels. Matrices come from the second-level cache at each token, and
  states and outputs pass through memory that only this program touches, with a barrier between tokens.

The forward pass keeps c, n, m and the four gates of every token for the backward pass, if there will be one. The
derivative is that of the definition, stabiliser included (see ../torch.py). Gradients of the gates are stored, and
those of the matrices are one product of them with the outputs of the tokens before.

Gates, states and sums are float32. Dots take bfloat16 where all gates are; float16, whose range a gradient may leave,
goes through tf32, which has as many digits, rounded to nearest; float32 stays float32. Transposes are loads in another
order.
"""

from seqblocks.kernels.slstm.triton.launch import run

__all__ = ["run"]
