"""Adversarial inputs, killed processes, long runs."""
