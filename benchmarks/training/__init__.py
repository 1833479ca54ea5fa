"""Training runs: optimizers beside each other at their best rates."""
