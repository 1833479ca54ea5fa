"""Matrix products whose result is symmetric, at half the work. Imports JAX alone."""

from pallas_kernels._symmetric_product import symmetric_product as symmetric_product

__all__ = ["symmetric_product"]
