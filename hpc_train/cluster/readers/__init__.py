"""Readers of topology files, one file a source; formats.py lists them in the order in which they are tried."""
