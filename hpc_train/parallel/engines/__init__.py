"""Engines own accumulation, loss scaling, clipping and the optimizer step (interfaces.Engine)."""
