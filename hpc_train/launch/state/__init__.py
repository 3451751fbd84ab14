"""The state of a run: its own markers first, then squeue, scontrol and sacct; job_state decides."""
