"""The schema of conf/: one dataclass a group, range checks, and one-line errors with suggestions."""
