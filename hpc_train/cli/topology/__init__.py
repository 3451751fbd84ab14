"""hpc-train topology: show a machine, place a run on it, and draw both."""
