"""LoRA, DoRA and QLoRA: a linear layer with an adapter, the names of its parameters, and weights in 4 bits."""
