"""Loggers of a run: CSV, Weights & Biases, MLflow, and those of installed packages, behind one interface."""
