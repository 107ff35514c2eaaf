"""`python -m minizero bench`: speed, as ratios within one run."""
