"""The cell magic `%%ranks`: a notebook's cell runs on every rank of a live pool.

After `%load_ext minizero`, a cell that begins with one of these lines

    %%ranks                  on as many ranks as there are, or as MINIZERO_RANKS says
    %%ranks 4                on 4 ranks
    %%ranks --timeout 10     and counts as hanging after 10 seconds without progress

runs on the ranks. Its names last from cell to cell, on each rank its own. They are
neither the notebook's names nor known to it; `pull` fetches one.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from IPython.core.error import UsageError

from minizero.lab.cells import execute, lookup
from minizero.ranks import TIMEOUT, Pool, RankError, default_ranks

__all__ = ["load_ipython_extension", "pull", "ranks"]

_pool: Pool | None = None
_cells = count(1)
_size: int | None = None  # of the pool, which may have ended


def ranks(line: str, cell: str) -> None:
    """Runs a cell on the ranks that the magic's line names."""
    number, timeout = _parse(line)
    try:
        pool = _live_pool(number)
        pool.timeout = timeout
        pool.run(execute, cell, f"<cell {next(_cells)}>")
    except (RankError, KeyboardInterrupt) as error:
        raise _brief(error) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def pull(name: str) -> list[Any]:
    """The value of a name of the cells under `%%ranks`, from each rank.

    Raises:
        RankError: a rank has no such name, or its value cannot be pickled.
        RuntimeError: no ranks are alive.
    """
    if _pool is None or not _pool.alive:
        raise RuntimeError("no ranks are alive; run a cell under %%ranks first.")
    return _pool.run(lookup, name)


def load_ipython_extension(ipython: Any) -> None:
    """Registers the magic; `%load_ext minizero` calls it."""
    ipython.register_magic_function(ranks, "cell", "ranks")


def _parse(line: str) -> tuple[int | None, float]:
    """Splits the magic's line into a number of ranks and a timeout."""
    words = line.split()
    timeout = TIMEOUT
    try:
        if "--timeout" in words:
            place = words.index("--timeout")
            timeout = float(words[place + 1])
            del words[place : place + 2]
        if not words:
            return None, timeout
        (word,) = words
        if int(word) < 1:
            raise ValueError
        return int(word), timeout
    except (ValueError, IndexError):
        raise UsageError(
            f"%%ranks cannot read {line!r}; write a number of ranks, such as 4 "
            "(and --timeout with a number of seconds)."
        ) from None


def _live_pool(number: int | None) -> Pool:
    """The pool there is, or a new one: it has died, or another size is wanted."""
    global _pool, _size
    wanted = number or _size or default_ranks()
    if _pool is not None:
        if _pool.alive and wanted == _size:
            return _pool
        why = "have died" if wanted == _size else "make room"
        print(f"The {_size} ranks {why}; {wanted} new ones start, without any names.")
        _pool.close()
    _pool, _size = Pool(wanted), wanted
    return _pool


def _brief(error: BaseException) -> BaseException:
    """The error, to be shown without the frames of this process."""
    if isinstance(error, KeyboardInterrupt):
        lines = ["KeyboardInterrupt: the ranks were ended."]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error
