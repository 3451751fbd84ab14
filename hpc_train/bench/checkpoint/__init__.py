"""`hpc-train bench checkpoint`: save, stall, load and verify against the disk itself and what else saves tensors."""
