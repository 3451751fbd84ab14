"""Draw a machine, or a run's ranks on it before and after placement.

picture.py draws panels on a canvas, each in one of two layouts: columns for a few nodes, rows for many.
"""
