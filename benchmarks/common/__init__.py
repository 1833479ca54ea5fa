"""Code that several benchmarks share: timing, provenance, tables, HLO counts, recorded momentum."""
