"""Models of the transformers library, trained as they are: which families, how each is split, and how it is built."""
