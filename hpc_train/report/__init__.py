"""Say how a run is doing, why it is slow, and what to change, from what it recorded."""
