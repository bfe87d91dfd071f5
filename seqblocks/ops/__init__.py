"""The primitives. Every file here is imported by `seqblocks.op.load_builtin`: a new file is a new verb."""
