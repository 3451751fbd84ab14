"""Memory: recomputation, offload of activations and parameters, and compilation of blocks."""
