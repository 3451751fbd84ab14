"""Optimizers that need more than a rank's own shards, and which parameters each optimizer updates."""
