"""A save under way: the writing, and the moment when it counts."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import torch

from . import tracker
from .agree import agree
from .folder import LATEST, fsync_folder, replace_file, retire, sweep
from .index import INDEX, Index, SavedFile, index_text, sealed, unsealed
from .launch import TIMEOUT, rank, world_size
from .tensorfile import CheckpointError, Source, TensorWriter, explained

LAST = 30.0  # seconds that a program that has ended waits for other ranks

# the saves of this process whose files are not to be swept
_busy: set[str] = set()


def file_name(r: int, nonce: str) -> str:
    """Without its suffix; no two saves have a file of one name."""
    return f"rank-{r:04d}-of-{world_size():04d}-{nonce}"


def copied(source: Source) -> Source:
    """A copy in host memory, which later steps leave alone."""
    # not page-locked: that would round it up to a power of two
    with tracker.host_memory():
        copy = torch.empty(source.numel, dtype=source.dtype)
    tracker.label(copy, "buffers", on="cpu")
    step = max(1, (1 << 22) // source.dtype.itemsize)
    for a in range(0, source.numel, step):
        b = min(a + step, source.numel)
        copy[a:b] = source.read(a, b)
    return Source(
        source.name, source.dtype, source.shape, lambda a, b: copy[a:b]
    )


class Saving:
    """A save that was begun; `wait()` says that it is complete.

    `path`: the checkpoint's folder. Every rank writes one file, and then a
    marker beside it with its length and checksum, or with an error. When
    rank 0 has seen all markers it puts the index in its place in one step:
    from then on there is the new checkpoint, and until then the one before.
    No collective is called but by `wait`, so a thread can do all of it.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        nonce: str,
        keep: int | None,
        latest: bool,
    ) -> None:
        self.path = folder / index.tag
        self._folder, self._index, self._nonce = folder, index, nonce
        self._keep, self._latest = keep, latest
        self._error: Exception | None = None
        self._written = threading.Event()
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False
        _busy.add(nonce)

    def begin(self, sources: list[Source], background: int) -> None:
        """Write at once what does not fit into `background` bytes.

        The rest is copied and written by a thread. What rests on a disk is
        never copied, so it has to come first.
        """
        size = len(sources)
        room = background
        while size and sources[size - 1].nbytes <= room:
            if sources[size - 1].on_disk:
                break
            size -= 1
            room -= sources[size].nbytes
        try:
            path = self.path / f"{file_name(rank(), self._nonce)}.safetensors"
            writer = TensorWriter(path, sources)
            try:
                for source in sources[:size]:
                    writer.write(source)
                rest = [copied(source) for source in sources[size:]]
            except BaseException:
                writer.close()
                raise
        except Exception as error:
            self._error = error
            self._report(None)
            return
        if background:
            self._thread = threading.Thread(
                target=self._behind, args=(writer, rest), name="checkpoint"
            )
            self._thread.start()
        else:
            self._write(writer, rest)

    def _behind(self, writer: TensorWriter, rest: list[Source]) -> None:
        self._write(writer, rest)
        if rank() == 0:
            self._commit()

    def _write(self, writer: TensorWriter, rest: list[Source]) -> None:
        try:
            try:
                while rest:
                    writer.write(rest[0])
                    del rest[0]  # its copy too
                writer.finish()
            finally:
                writer.close()
        except Exception as error:
            self._error = error
        self._report(writer)

    def _report(self, writer: TensorWriter | None) -> None:
        """Leave the marker; what an error has left of the file goes first."""
        path = self.path / f"{file_name(rank(), self._nonce)}.safetensors"
        try:
            if self._error is None and writer is not None:
                facts = {"bytes": writer.nbytes, "crc32": writer.crc32}
                marker: dict[str, Any] = {"name": path.name, **facts}
            else:
                marker = {"error": str(self._error) or repr(self._error)}
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            replace_file(
                path.with_suffix(".json"), sealed(marker), self._nonce
            )
        except Exception as error:
            self._error = self._error or error
        finally:
            self._written.set()

    def _commit(self) -> None:
        """Rank 0: make the checkpoint count, then clean up."""
        try:
            self._replace_index(self._markers())
        except Exception as error:
            self._error = self._error or error
        try:
            _busy.discard(self._nonce)
            if self._keep is not None and self._error is None:
                retire(self._folder, self._keep)
            sweep(self._folder, _busy)
        except OSError as error:
            self._error = self._error or CheckpointError(
                f"{self.path}: the checkpoint is complete, but what is older "
                f"cannot be deleted: {error}"
            )

    def _replace_index(self, markers: list[dict[str, Any]]) -> None:
        for marker in markers:
            if "error" in marker:
                raise CheckpointError(marker["error"])
        self._index.files = [SavedFile(**marker) for marker in markers]
        replace_file(self.path / INDEX, index_text(self._index), self._nonce)
        fsync_folder(self._folder)
        if self._latest:
            name = f"{self._index.tag}\n".encode()
            replace_file(self._folder / LATEST, name, self._nonce)

    def _patience(self) -> float:
        """Seconds to wait for a marker; few if this program has ended."""
        return TIMEOUT if threading.main_thread().is_alive() else LAST

    def _markers(self) -> list[dict[str, Any]]:
        """What each rank has written, when all have said so."""
        began, markers = time.monotonic(), []
        for r in range(world_size()):
            path = self.path / f"{file_name(r, self._nonce)}.json"
            while not path.exists():
                if self._abandoned.is_set():
                    raise CheckpointError(f"{path}: the save was given up")
                waited = time.monotonic() - began
                if waited > self._patience():
                    raise CheckpointError(
                        f"{path}: rank {r} has not finished its file within "
                        f"{waited:.0f} s; it may have ended, or "
                        f"{self._folder} is not one folder on all nodes. The "
                        "checkpoint before this one is whole"
                    )
                time.sleep(0.01)
            markers.append(unsealed(path))
        return markers

    def wait(self) -> None:
        """Return when the checkpoint is complete: on every rank or on none.

        A collective. Raises CheckpointError, in the same words on all ranks,
        if any of them failed; the checkpoint before this one is then whole.
        A second call does nothing.
        """
        if self._over:
            return
        self._over = True
        self._written.wait()
        try:
            self._agree()  # that all files are written
        except CheckpointError:
            self._abandoned.set()
            raise
        finally:
            if self._thread is not None:
                self._thread.join()
            elif rank() == 0:
                self._commit()
            _busy.discard(self._nonce)
        self._agree()  # that rank 0 has committed

    def _agree(self) -> None:
        error = self._error
        if isinstance(error, OSError):
            error = explained(self.path, error)
        agree(error)
