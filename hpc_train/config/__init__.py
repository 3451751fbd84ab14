"""The schema of conf/: one dataclass per group, range checks, and one-line errors with suggestions."""
