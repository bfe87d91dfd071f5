"""What the kernels keep for the backward pass and need besides, recorded on a tape (seqblocks/tape.py).

One file for each family whose derivative is written by hand. They describe the torch implementations on a CPU. Their
sizes of blocks are those of `kernels/`, which cannot be imported without torch; a test compares them.
"""
