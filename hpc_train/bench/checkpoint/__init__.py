"""`hpc-train bench checkpoint`: time our saves and loads beside those of other libraries, in and outside a loop."""
