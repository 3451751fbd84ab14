"""Training loop, optimizer, metrics, events and run directory."""
