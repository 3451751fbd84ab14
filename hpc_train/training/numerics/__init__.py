"""React when numbers go wrong: skip a step, roll back, compute a step again, compare copies of parameters."""
