"""DeepSpeed's names: in a script's import lines `deepspeed` becomes `minizero.deepspeed`.

Nothing is implemented twice. Read `names` (which name is what, and what is not done
here); then what has no other place: `parameters` on `views` (a parameter, its gradient
and its states), `sharding` (of a model that is being built), `processes`, `devices`,
`optimizers`, `weights`, `logs`, `unsharded`, `arguments` (of a command line), and
`checkpointing` (functions computed again in backward). Imports everything below.
"""

from . import names

__version__ = "0.19.8"  # of DeepSpeed, whose names these are
__getattr__ = names.lookup("")
names.install()
