"""The members of an optimizer's chain, a file each: momentum, orthogonalization,
sizes of updates, statistics.

`learning_rate` has the last member, and `adamw` the chain for the leaves that are no matrices.
"""
