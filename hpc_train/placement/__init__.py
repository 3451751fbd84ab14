"""Decide which rank runs where.

The cost of a rank map on a fabric, the search for a better one, binding to processors and NICs.
"""
