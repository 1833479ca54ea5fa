"""Code that several benchmarks share: timing, provenance, result blocks, HLO counts, recorded momentum."""
