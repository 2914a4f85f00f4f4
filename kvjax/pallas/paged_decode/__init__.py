"""Attention of new queries over exact keys and values in pages."""
