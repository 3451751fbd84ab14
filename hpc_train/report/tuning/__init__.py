"""Find faster settings for a training by short runs."""
