"""TPUs: compiled for one without it."""
