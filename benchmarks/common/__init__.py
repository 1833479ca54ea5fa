"""What several benchmarks share: timing, provenance, HLO counts, recorded momentum."""
