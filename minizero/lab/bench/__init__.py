"""`python -m minizero bench`: speed, as ratios within one run.

`runner` finds the benchmarks, one in each of the other files, and takes turns.
"""
