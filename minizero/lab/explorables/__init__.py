"""Figures to play with: each has its Python and its JavaScript side by side.

`base` is what they share: a figure draws itself from its HTML in the book, where there
is no kernel, and is a widget in Jupyter.
"""
