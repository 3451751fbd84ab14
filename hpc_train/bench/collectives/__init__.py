"""`hpc-train bench collectives`: what the network gives to each mesh axis, and the constants of its levels."""
