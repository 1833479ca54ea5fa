"""Orthogonalization of sharded parameters: layout, owners, all-to-all exchange, and what it costs."""
