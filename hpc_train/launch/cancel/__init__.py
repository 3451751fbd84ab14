"""Cancel runs: ask them to save and end, and kill those that do not."""
