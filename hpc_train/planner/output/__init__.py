"""A plan as a table, as JSON and as a picture. Formats only: nothing is computed or chosen here."""
