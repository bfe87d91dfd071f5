"""A small valid spec, and an invalid one."""

GOOD = "seqblocks: 1\nlet: {dim: 8}\nmodel: {input: {features: dim}, steps: [{linear: {features: 4}}]}\n"
BAD = GOOD.replace("linear", "linaer")
