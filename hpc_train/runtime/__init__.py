"""Turn a started process into a rank: identity, rendezvous, rank assignment, process group, consensus, signals."""
