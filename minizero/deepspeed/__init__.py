"""Names that exist for DeepSpeed's sake, so that a script needs one word changed.

`utils` (what a parameter, its gradient and its states are now; on `views`),
`checkpointing` (functions computed again in backward), `arguments` (of a command line).
`minizero.utils` and `minizero.checkpointing` are these. Imports everything below.
"""
