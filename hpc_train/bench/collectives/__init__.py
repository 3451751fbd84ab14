"""`hpc-train bench collectives`: time every collective over each mesh axis and check what it returns."""
