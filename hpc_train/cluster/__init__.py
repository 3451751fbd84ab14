"""Describe machines: GPUs, NICs, links and switches, from the machine itself or from files (readers/)."""
