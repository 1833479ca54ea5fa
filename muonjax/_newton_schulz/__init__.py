"""Newton-Schulz orthogonalization: scaling, deflation, normalization, and the polynomials."""
