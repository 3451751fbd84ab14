"""The planner: memory, step time, search, cost and reliability of a training run before it is started."""
