"""Mixtures of experts over ranks: experts split over ep, tokens sent to them, and loads counted over all ranks."""
