"""Attention of new queries over anchors, coefficients and coded residuals."""
