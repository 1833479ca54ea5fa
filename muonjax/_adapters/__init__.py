"""Low-rank Hadamard adapters (LoHa), whatever library the model is written in."""
