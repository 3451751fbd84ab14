"""`plan rehearse`: build the ranks of a large world with the real passes, on one CPU and without their memory."""
