"""Train models of the transformers library unchanged: which families are supported, how each is split and built."""
