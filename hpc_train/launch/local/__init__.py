"""Runs on this machine: start the ranks, share out its processors, and end them together."""
