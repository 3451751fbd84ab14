"""The keys of a configuration: which keys exist, what conf/ offers for each, and how a command line sets them."""
