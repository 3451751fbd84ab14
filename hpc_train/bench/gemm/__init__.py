"""`hpc-train bench gemm`: what a device multiplies and copies, by shape and precision."""
