"""Matrix sign functions for models that orthogonalize in their forward pass, with derivatives of every order.

`msign` differentiates as `polynomial_gradient` (the polynomial that ran) or as `polar_gradient` (the polar factor).
`mcsgn` is the sign of square matrices by their eigenvalues. `inputs` checks and scales what both take.
"""
