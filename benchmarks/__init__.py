"""Benchmarks, run as python -m benchmarks.optimizer.muon_step; each writes JSON into results/."""
