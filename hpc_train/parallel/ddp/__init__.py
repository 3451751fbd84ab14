"""DistributedDataParallel: every rank holds the whole model; what is done to gradients on their way."""
