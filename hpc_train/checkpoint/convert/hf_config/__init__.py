"""Convert the config.json of transformers from and to our model config: one file for each group of similar families."""
