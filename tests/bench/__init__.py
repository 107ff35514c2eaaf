"""Benchmarks, and what is run on a GPU: `make bench`, `make gpu`."""
