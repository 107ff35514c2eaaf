"""Writes what is recorded to a file, in Chrome's trace format, and a hang's too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from .. import comm
from ..memory.trace import Trace
from ..memory.tracker import Tracker
from ..ranks.launch import rank, world_size
from ..zero.data_parallel import DataParallel
from .engine import Engine
from .recording import Recording

QUIET = 2.0
"""Seconds without an event after which a rank's part is written: it may be killed."""


@contextmanager
def trace(
    engine: Engine | DataParallel,
    path: str | Path | None = None,
    tracker: Tracker | None = None,
) -> Iterator[Recording]:
    """Record the steps inside the block: when, where, for which unit, how many bytes.

    Every rank enters it, at the same moment. Afterwards the result's `trace` is this
    rank's; with `path`, rank 0 has written all ranks' there as Chrome trace JSON, which
    Perfetto and the book's timeline open. If the block fails, or nothing happens in it
    for `QUIET` seconds, each rank leaves its own part, `path` with `.rank0` and so on
    at its end: calls that it was waiting for last until then, so that the parts of a
    hang show who waited for whom, even if the ranks are killed for it.

    `tracker`: one that is running, and has counted what came before; else there is one
    that counts what is labelled, and what comes.
    On a GPU the times of what is computed and copied are the host's, of launching it.
    """
    net = engine.net if isinstance(engine, Engine) else engine
    record = Recording(net, tracker)
    with _kept(record, path), record.recording():
        yield record
    if path is not None:
        comm.barrier()
        if rank() == 0:
            merge(path, world_size())


@contextmanager
def _kept(record: Recording, path: str | Path | None) -> Iterator[None]:
    """Write this rank's part in the end, and meanwhile when nothing happens."""
    if path is None:
        yield
        return
    over = Event()

    def write(trace: Trace) -> None:
        part(path, rank()).write_text(json.dumps(trace.chrome()))

    def watch() -> None:
        before = written = 0
        while not over.wait(QUIET):
            now = record.events()
            if now == before != written:
                write(record.until(time.perf_counter()))
                written = now
            before = now

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        write(record.trace)


def part(path: str | Path, of: int) -> Path:
    """Where a rank writes its own trace."""
    return Path(f"{path}.rank{of}")


def merge(path: str | Path, ranks: int) -> None:
    """Make one file of the parts that are there, and delete them."""
    parts = [there for r in range(ranks) if (there := part(path, r)).exists()]
    whole, *others = [json.loads(there.read_text()) for there in parts]
    for other in others:
        whole["traceEvents"] += other["traceEvents"]
    Path(path).write_text(json.dumps(whole))
    for there in parts:
        there.unlink()
