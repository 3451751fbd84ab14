"""Advice: what of a run's configuration is wrong, slow or risky, why, and what to write instead."""
