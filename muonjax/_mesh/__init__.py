"""Sharded parameters: every matrix has one owner, which orthogonalizes it.

Which device computes: `assignment` gives each matrix to a device, or to several where matrices are fewer than devices,
so that all have equal work. What is exchanged, and when: `exchange` sends the owners what other devices store of their
matrices, once an update, and the results back. `distribution` is what users give, or arrays say, of how parameters are
sharded, and places an optimizer's state.
"""
