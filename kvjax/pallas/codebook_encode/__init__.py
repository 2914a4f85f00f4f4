"""Rotated vectors coded coordinate by coordinate, packed, with their norms."""
