"""The built-in primitives. `seqblocks.op.load_builtin` imports every file here, so a new file adds its verbs."""
