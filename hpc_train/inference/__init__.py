"""Use a trained model: load it whole in one process, and generate text."""
