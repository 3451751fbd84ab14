"""Estimate memory and time of many jobs at once. inputs.py has the columns that are given, jobs.py those that follow.

A function is named by the quantity it returns, such as bubble_seconds. Shapes: [n] is a value for each job, [3, n] one
for the first, a middle and the last stage of its pipeline; a scalar [] stands for all jobs.

Time: layer/ has the computation and communication of a layer; step_time.py makes a step of layers, with network.py.
Memory: peak_memory/ searches a step's moments, with layer/activations.py and pipeline.py; memory.py adds what the
allocator and the driver take, and has the formulas of published stacks. from_config.py makes jobs of a run, with
machine_columns.py, accelerators.py and fabric.py.
"""
