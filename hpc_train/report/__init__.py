"""Say how a run is, why it is slow, and what to change, from what it recorded."""
