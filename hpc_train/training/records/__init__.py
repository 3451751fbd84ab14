"""Write and read what a run records while it trains: metrics, events, step times, warnings, logs."""
