"""Attention of new queries over quantized keys and values with their low-rank and sparse error."""
