"""What a rank does for a notebook's cells: run one, and look a name up.

All cells that a rank runs share one namespace, that of its module `__main__`.
"""

from __future__ import annotations

import ast
import linecache
import sys
from typing import Any


def execute(source: str, name: str) -> str | None:
    """Run `source` in this rank's namespace, as a notebook runs a cell.

    Prints the value of a last expression, unless it is None, and returns its repr.
    """
    __tracebackhide__ = True  # an error begins in the cell
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    names = vars(sys.modules["__main__"])
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    # dont_inherit: the cell would get this module's __future__ imports
    exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), names)
    if not isinstance(last, ast.Expr):
        return None
    code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
    value = eval(code, names)
    if value is None or source.rstrip().endswith(";"):
        return None
    names["_"] = value
    print(text := repr(value))
    return text


def lookup(name: str) -> Any:
    """The value of a variable of this rank's namespace."""
    names = vars(sys.modules["__main__"])
    if name not in names:
        raise NameError(f"no variable {name!r} in this rank's namespace")
    return names[name]
