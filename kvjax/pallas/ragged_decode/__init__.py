"""Attention of new queries over exact keys and values whose heads share a pool of slots."""
