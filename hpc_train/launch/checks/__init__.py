"""Checks before any rank starts: the run as a whole, its model with its data, and the files that it names."""
