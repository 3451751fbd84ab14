"""Labelled images: folders and WebDataset tars, the store that is built from them, and samples cut out of it."""
