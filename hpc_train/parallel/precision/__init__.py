"""Number formats: how parameters are stored, computed and reduced, the loss scale of fp16, and products in 8 bits."""
