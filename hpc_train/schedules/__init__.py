"""Pipeline schedules, without torch: generate, read, write, validate and simulate the order of computations."""
