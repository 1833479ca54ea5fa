"""LoHa adapters: low-rank Hadamard products, one adapter of one layer, its settings, and LyCORIS files."""
