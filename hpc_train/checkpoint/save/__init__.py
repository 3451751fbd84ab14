"""Write a checkpoint: stage the tensors of each rank, write files, and commit the step by one rename."""
