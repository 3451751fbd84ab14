"""The training loop and what surrounds it: optimizer, schedules, metrics, events, the run folder."""
