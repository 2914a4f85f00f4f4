"""Attention of new queries over rotated codebook codes."""
