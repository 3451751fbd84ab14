"""Watch a run, say what is wrong with it, and keep it running."""
