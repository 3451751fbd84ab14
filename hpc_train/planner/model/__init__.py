"""Estimate memory and time of many jobs at once: jobs.py has the columns that every formula here is made of.

A function is named by the quantity it returns, such as bubble_seconds. Shapes: [n] is a value for each job, [3, n] one
for the first, a middle and the last stage of its pipeline; a scalar [] stands for all jobs.

Time: layer.py has the computation of a layer, from products.py (matrix products) and experts.py; layer_time.py adds its
communication, by network.py; step_time.py makes a step of layers. Memory: peak_memory/ searches a step's moments, with
activations.py and pipeline.py; memory.py adds what the allocator and the driver take, and has the formulas of published
stacks. from_config.py makes jobs of a run, with accelerators.py and fabric.py.
"""
