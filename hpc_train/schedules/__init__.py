"""Orders of a pipeline, without torch: which rank computes what after what. Generate, check, read, write, simulate."""
