"""Kinds of samples: cut from a stream of tokens, one document each, several packed documents, or from a mixture."""
