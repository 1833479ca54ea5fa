"""The matrix sign functions msign and mcsgn, with exact derivatives."""
