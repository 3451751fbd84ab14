"""`plan rehearse`: every kind of rank of a large world, built with the real passes on one CPU, without its memory."""
