"""Bytes that every mesh axis moves in one step, computed from the model's shape and the degrees. No torch."""
