"""The rows of the table of techniques: technique.py says what a row has, each other file has the rows of one kind."""
