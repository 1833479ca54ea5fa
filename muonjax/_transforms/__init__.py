"""The members of an optimizer's chain, a file each: momentum, orthogonalization, sizes of updates, statistics.

`learning_rate` has the last member, and AdamW with the same rate.
"""
