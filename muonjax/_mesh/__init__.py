"""Orthogonalization of sharded parameters: layout, owners and all-to-all exchange.

In the order in which to read it: `layout` says how a device stores matrices, in units that have one owner; `assignment`
and `rounds` say which owner gets which units, and in which exchange; `exchange` packs, sends and unpacks them;
`owner_loop` computes at the owner; `sharded_map` is what `orthogonalize` calls. `distribution` is what users give,
or arrays say.
"""
