"""The optimizer step: time, memory, compilation, polar error, communication."""
