"""Fused operations on raw arrays: one folder an op, with `api.py` and one file a backend."""
