"""`hpc-train bench gpu`: measure what this project claims about one GPU, in a few minutes."""
