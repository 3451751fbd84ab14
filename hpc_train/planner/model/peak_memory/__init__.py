"""Peak memory of hpc_train's own steps: rank_weights.py and step_sizes.py count what no moment of a step changes,
step_peaks.py what a rank holds at each moment, and takes the largest.
"""
