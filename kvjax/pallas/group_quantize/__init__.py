"""Codes, scales and zeros of groups of neighbours, quantized and packed in one pass."""
