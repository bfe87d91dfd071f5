"""Turn a spec into a typed graph, in stages: each folder may import only those above it.

    scope             names, values and wires that a step can refer to
    checkpoint_maps   `checkpoint:` maps, and the names that they translate
    steps             each step becomes a node: primitives, blocks, combinators
    passes            what a finished graph determines: lookahead, unused parameters, `expect:`

`lower.py` runs the stages on a file, and `check.py` loads and checks specs.
"""
