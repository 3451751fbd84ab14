"""`hpc-train checkpoint ...`: what each command does and prints.

Their arguments are in hpc_train.checkpoint_arguments.
"""
