"""Benchmarks of two ranks in network namespaces of their own, joined by a link whose bandwidth is set (root, Linux)."""
