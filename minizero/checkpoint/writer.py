"""A save under way: what each rank writes, now or in the background."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from ..memory import labels
from ..comm.agreement import agree
from .commit import Commit, busy, file_name, leave_marker
from ..ranks.launch import rank
from .tensor_file import CheckpointError, explained
from .tensor_writer import Source, TensorWriter


def copied(source: Source) -> Source:
    """A copy in host memory, which later steps leave alone."""
    # not page-locked: that would round it up to a power of two
    with labels.host_memory():
        copy = torch.empty(source.numel, dtype=source.dtype)
    labels.label(copy, "buffers", on="cpu")
    step = max(1, (1 << 22) // source.dtype.itemsize)
    for a in range(0, source.numel, step):
        b = min(a + step, source.numel)
        copy[a:b] = source.read(a, b)
    return Source(source.name, source.dtype, source.shape, lambda a, b: copy[a:b])


class Saving:
    """A save that was begun; `wait()` says that it is complete.

    `path`: the checkpoint's folder. Every rank writes one file, and then a
    marker beside it with its length and checksum, or with an error. When
    rank 0 has seen all markers it puts the index in its place in one step:
    from then on there is the new checkpoint, and until then the one before.
    No collective is called but by `wait`, so a thread can do all of it.
    """

    def __init__(self, commit: Commit) -> None:
        self.path, self._nonce = commit.path, commit.nonce
        self._commit = commit
        name = file_name(rank(), self._nonce)
        self._file = self.path / f"{name}.safetensors"
        self._error: Exception | None = None
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False
        busy.add(self._nonce)

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
            writer = TensorWriter(self._file, sources)
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
        except BaseException:  # an interrupt: this save is forgotten
            busy.discard(self._nonce)
            raise
        if background:
            self._thread = threading.Thread(
                target=self._behind, args=(writer, rest), name="checkpoint"
            )
            self._thread.start()
        else:
            self._write(writer, rest)

    def _behind(self, writer: TensorWriter, rest: list[Source]) -> None:
        self._write(writer, rest)
        self._make_count()

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
        facts: dict[str, Any] = {}
        try:
            if self._error is None and writer is not None:
                facts = {"bytes": writer.nbytes, "crc32": writer.crc32}
            else:
                facts = {"error": str(self._error) or repr(self._error)}
                with contextlib.suppress(OSError):
                    self._file.unlink(missing_ok=True)
            leave_marker(self._file, facts, self._nonce)
        except Exception as error:
            self._error = self._error or error
        finally:
            self._written.set()

    def _make_count(self) -> None:
        if rank() == 0:
            try:
                self._commit.run()
            except Exception as error:
                self._error = self._error or error

    def wait(self) -> None:
        """Return when the checkpoint is complete: on every rank or on none.

        A collective. Raises CheckpointError, in the same words on all ranks,
        if any of them failed; the checkpoint before this one is then whole.
        A second call does nothing.
        """
        if self._over:
            return
        self._over = True
        try:
            self._finish()
        finally:
            # it knows the stack it came through, and with that the net
            self._error = None

    def _finish(self) -> None:
        self._written.wait()
        try:
            self._agree()  # that all files are written
        except BaseException:  # a dead peer raises no CheckpointError
            self._commit.abandon()
            raise
        finally:
            if self._thread is not None:
                self._thread.join()
            else:
                self._make_count()
            busy.discard(self._nonce)
        self._agree()  # that rank 0 has committed

    def _agree(self) -> None:
        error = self._error
        if isinstance(error, OSError):
            error = explained(self.path, error)
        agree(error, CheckpointError)
