"""Declarations to the typed graph: names, values, wires, steps, blocks, combinators, checkpoint maps, expectations."""
