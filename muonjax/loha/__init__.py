"""Low-rank Hadamard adapters (LoHa): the product x · (W + ΔW), and what the layers of Linen and NNX share."""
