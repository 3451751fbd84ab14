"""`hpc-train bench step`: compare our step with hand-written loops and other libraries in one process group."""
