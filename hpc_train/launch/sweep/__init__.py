"""Sweeps: many runs from one command, as few job arrays as they have resource shapes, one directory and ledger."""
