"""The shipped configuration values, installed as the package `hpc_train.conf`."""
