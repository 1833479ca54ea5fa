"""Matrix products whose result is symmetric, at half the work. Imports JAX alone."""
