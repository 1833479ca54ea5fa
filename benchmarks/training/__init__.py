"""Training runs: optimizers compared at their best learning rates."""
