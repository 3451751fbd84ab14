"""hpc-train bench: one sub-command for each benchmark."""
