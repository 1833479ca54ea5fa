"""Which parameters Muon takes, and as which matrices: decided from paths, shapes and siblings."""
