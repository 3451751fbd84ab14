"""Refuse values out of range, fields that contradict one another, and secrets in a configuration."""
