"""The training loop and what surrounds it: optimizer, metrics, events, the run directory."""
