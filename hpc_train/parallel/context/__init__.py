"""Context parallelism: the positions of a sequence split over the axis cp."""
