"""GPUs: measured on one, or compiled for one without it."""
