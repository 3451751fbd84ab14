"""Describe a machine as it describes itself: GPUs, NICs, links and switches. Files are read in readers/."""
