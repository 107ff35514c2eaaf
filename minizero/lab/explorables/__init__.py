"""Figures to play with: each has its Python and its JavaScript side by side."""
