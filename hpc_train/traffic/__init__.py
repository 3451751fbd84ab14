"""Bytes that every mesh axis moves in one step, computed from the model's shape and the degrees. No torch.

flows.py is the entry. It asks data_flows.py and model_flows.py for the flows of a run; these take weights and stages
from shaped_run.py and the formulas of each technique from axes.py and model_axes.py.
"""
