"""Readers of files about one node: GPUs, NICs, processors and the links between them."""
