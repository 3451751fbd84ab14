"""What a user of a machine measures first: here, the training step against a loop written by hand."""
