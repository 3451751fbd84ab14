"""Lints of a run's configuration: each finds one thing that is wrong, slow or risky, and says what to change."""
