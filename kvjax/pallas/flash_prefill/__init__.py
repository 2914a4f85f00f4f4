"""Exact causal attention of a left-padded prompt."""
