"""What a step can refer to: names and their values, wires, the steps above it, and the context that holds them."""
