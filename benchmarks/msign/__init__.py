"""The matrix sign function and its derivatives."""
