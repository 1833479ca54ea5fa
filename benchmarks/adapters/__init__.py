"""LoHa adapters: time, memory, and a fine-tuning run."""
