"""The laboratory: what the chapters, their figures and the command line need.

`models/` (a GPT, its text, other models to measure) and `training/` (the main job, its
report, its recovery) train; `toygpu` enforces a budget of bytes, and
`toymachine` makes bytes cost time; `magic` is `%%ranks`; `plots/` draws figures and
`explorables/` figures to play with; `bench/` measures speed; `hardware`,
`units` is what several of them share. Imports anything of
minizero; nothing that trains imports it.
"""
