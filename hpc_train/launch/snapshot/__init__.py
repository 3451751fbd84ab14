"""The user's code as it was at submission: copied once, found by its hash, imported by the ranks."""
