"""The matrix sign for models that orthogonalize in their forward pass,
with derivatives of every order.

`msign` differentiates as `polynomial_gradient` says: the polynomial that ran, keeping the matrix
alone. `inputs` checks and scales its arguments.
"""
