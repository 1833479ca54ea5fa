"""QK-Clip: which weights belong to which head, how large their logits are, and how they are scaled."""
