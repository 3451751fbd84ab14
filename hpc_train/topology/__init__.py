"""The command `hpc-train topology`: what a machine is made of, where ranks go, and pictures of both."""
