"""Do the tests find code that is broken on purpose? `python -m tests.mutations` tells."""
