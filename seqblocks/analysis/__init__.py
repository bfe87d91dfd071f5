"""Lower a spec to a typed graph: names, values, wires, steps, blocks, combinators, checkpoint maps, expectations."""
