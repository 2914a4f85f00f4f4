"""Attention of new queries over group-quantized keys and values."""
