"""Models that take one token at a time: the plan of a token, streams, generation."""
