"""Bytes that every mesh axis moves in one step, from the model's shape and the degrees alone. No torch."""
