"""`hpc-train bench step`: our training step beside hand-written loops and other libraries, in one process group."""
