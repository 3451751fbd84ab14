"""Placement inside one node: which local rank takes which GPU, NIC, processors and memory."""
