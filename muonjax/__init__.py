"""Muon and MuonClip for JAX: Optax gradient transformations for people who train Flax models."""
