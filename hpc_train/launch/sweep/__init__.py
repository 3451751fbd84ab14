"""Sweeps: many runs from one command, one job array for each resource shape, one directory and one ledger."""
