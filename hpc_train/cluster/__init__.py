"""What a machine is made of, as the machine tells it: GPUs, NICs, links and switches. One reader a source."""
