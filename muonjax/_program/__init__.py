"""What the user's own function says, read from its jaxpr: matrices, attention sites, largest logits."""
