"""Pictures of a machine, and of a run's ranks on it before and after placement.

picture.py draws panels on a canvas, in one of two layouts: columns for a few nodes, rows for many.
"""
