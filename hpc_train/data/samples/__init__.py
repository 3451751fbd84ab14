"""What one sample of a run is: cut from a stream of tokens, a document, several packed documents, or a mixture."""
