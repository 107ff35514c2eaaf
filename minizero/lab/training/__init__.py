"""The main job: `python -m minizero train`."""
