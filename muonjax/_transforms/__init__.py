"""The members of an optimizer's chain: momentum, orthogonalization, sizes of updates and weights, statistics."""
