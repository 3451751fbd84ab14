"""Readers of topology files: one file per source, each turns text into a Cluster.

Those of one node are in node/, those of InfiniBand's tools in infiniband/, those of Slurm in slurm/. To add a format,
write a module in one of them with two functions and add one entry to `list_formats` in formats.py:

    matches_<format>(text) -> bool           whether a text looks like the format; no two formats may claim one text
    read_<format>(text, name) -> Cluster     parse it; UserError `FILE:LINE: what; expected ...` for what is malformed

What the source does not say stays empty or None in the Cluster. Readers of several files (nvidia_smi, ibnetdiscover,
slurm_topology) keep their grammar in a second file: nvidia_smi_rows, ibnetdiscover_text, slurm_records.
"""
