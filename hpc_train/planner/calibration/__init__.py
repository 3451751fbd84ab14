"""Measured runs: read them, fit the constants to them, and report the errors that remain."""
