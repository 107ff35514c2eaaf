"""The main job, `python -m minizero train`.

`job` (its options, checked before anything starts), `train` (the loop), `report` (what
it measured beside the formulas), `keeper` and `recovery` (checkpoints, and a run that
goes on after a rank was killed).
"""
