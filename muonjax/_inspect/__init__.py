"""What a function does with its parameters, read from its jaxpr: matrices, attention, largest logits."""
