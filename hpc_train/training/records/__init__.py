"""What a run writes down while it trains, and how others read it: metrics, events, step times, warnings, logs."""
