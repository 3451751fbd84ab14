"""hpc-train checkpoint: list, inspect, verify, convert and remove checkpoints."""
