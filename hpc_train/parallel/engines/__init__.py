"""Engines: what owns accumulation, scaling, clipping and the optimizer (api.Engine)."""
