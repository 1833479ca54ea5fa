"""Sharded parameters: every matrix has one owner, which orthogonalizes it.

`distribution` says how parameters are sharded over a mesh, and `matrix_shards` what follows for
their matrices. `assignment` gives each matrix to a device, so that all have equal work.
`map_on_mesh` sends the owners what other devices store of their matrices, once an update, and the
results back. `state_shardings` places an optimizer's state, and `host_memory` keeps it in the
host's memory between updates.
"""
