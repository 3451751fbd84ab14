"""Parameter servers and neighbour averaging over MPI's one-sided communication: the baseline to all-reduce."""
