"""The matrix sign for models that orthogonalize in their forward pass, with derivatives of every order.

`msign` differentiates as `polynomial_gradient` (the polynomial that ran) or as `polar_gradient` (the polar factor).
`inputs` checks and scales its arguments.
"""
