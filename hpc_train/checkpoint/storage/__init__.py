"""Where checkpoints lie: steps and their names, the lock, file systems, striping, and what is removed when."""
