"""Nearest anchor, coefficient and utility of every token."""
