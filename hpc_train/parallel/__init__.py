"""Techniques, one file each; apply.py shows the order in which they are applied. The model knows nothing of them."""
