"""Tensor parallelism: the matrices of a layer, and the vocabulary, split over the axis tp."""
