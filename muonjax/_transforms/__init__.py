"""Statistics of an optimizer's step: measured into its state, and read from there for a log."""
