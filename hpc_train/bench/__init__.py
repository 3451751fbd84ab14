"""Benchmarks: what a user of a machine measures, one module per benchmark.

A module NAME.py starts the benchmark and needs no torch; NAME_rank.py runs in each rank. local_ranks.py starts
ranks on this machine, rounds.py times several sides in interleaved rounds.
"""
