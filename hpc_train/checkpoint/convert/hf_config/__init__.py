"""The config.json of transformers from and to our model config: one file for families that are alike."""
