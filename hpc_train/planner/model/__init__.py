"""Estimate memory and time of many jobs at once: jobs.py has the columns that every formula here is made of.

A function is named by the quantity it returns, such as bubble_seconds. Shapes: [n] is a value for each job, [3, n] one
for the first, a middle and the last stage of its pipeline; a scalar [] stands for all jobs.
"""
