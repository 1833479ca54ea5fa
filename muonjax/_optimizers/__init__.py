"""The optimizers; `partition` splits the matrices from all other leaves."""
