"""Newton-Schulz orthogonalization: `polar_factor` chooses between two iterations.

`iteration` multiplies in float32 or wider, follows the whole Gram form, and deflates the Gram matrix, which it has
anyway (`deflation`). `half_precision` rounds the operands and sums in float32: it never adds the identity to a matrix
before that is rounded, fuses the last steps alone, and deflates X itself before rounding (`thin_deflation`), since the
rounding error of a dominant direction is as large as the small singular values. Neither can replace the other: on
equal input their sums differ. Two more have callers of their own: `_msign` has derivatives, `optax_contrib` takes its
coefficients from a state.
"""
