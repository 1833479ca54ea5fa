"""Leaves as stacks of matrices (`matrix_view`),
and stacks of equal shape that share one program (`batching`)."""
