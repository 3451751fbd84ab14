"""`hpc-train bench gpu`: what this project claims about one GPU, measured there in a few minutes."""
