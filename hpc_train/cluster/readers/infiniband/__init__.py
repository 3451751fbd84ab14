"""Readers of InfiniBand's tools: adapters, switches and cables."""
