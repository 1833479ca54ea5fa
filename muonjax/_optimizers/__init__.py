"""The optimizers: `muon` without a clip, `muonclip` with one; `partition` splits the matrices from all other leaves."""
