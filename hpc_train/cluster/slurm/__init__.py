"""What Slurm says of a cluster: host lists, addresses of nodes, and its topology in every form."""
