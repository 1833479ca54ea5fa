"""Matrix products whose result is symmetric, at half the work. Imports JAX alone."""

from pallas_kernels._api import symmetric_product as symmetric_product

__all__ = ["symmetric_product"]
