"""Text to tokens and back: our own tokenizers, those of a folder, and their chat templates."""
