"""The truth about a run's state: its own markers, then squeue, scontrol, sacct; `decide` makes a word of them."""
