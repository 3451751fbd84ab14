"""`hpc-train bench checkpoint`: time saves and loads beside raw disk I/O and other libraries."""
