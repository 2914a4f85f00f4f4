"""Attention that each key gets from all queries of a causal prompt, summed."""
