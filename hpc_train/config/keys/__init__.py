"""The keys of a configuration: which there are, what conf/ offers for each, and overrides of them on a command line."""
