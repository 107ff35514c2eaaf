"""A save under way: what each rank writes, now or in the background."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from ..comm.agreement import agree
from ..memory import labels
from ..ranks.launch import rank
from .commit import Commit, busy, leave_marker, written_by
from .tensor_file import CheckpointError, LazyTensor, TensorWriter, explained


def copied(tensor: LazyTensor) -> LazyTensor:
    """A copy in host memory, which later steps leave alone."""
    # not page-locked: that would round it up to a power of two
    with labels.host_memory():
        copy = torch.empty(tensor.numel, dtype=tensor.dtype)
    labels.label(copy, "buffers", on="cpu")
    step = max(1, (1 << 22) // tensor.dtype.itemsize)
    for a in range(0, tensor.numel, step):
        b = min(a + step, tensor.numel)
        copy[a:b] = tensor.read(a, b)
    return LazyTensor(tensor.name, tensor.dtype, tensor.shape, lambda a, b: copy[a:b])


class Saving:
    """A save that was begun; `wait()` says that it is complete.

    `path`: the checkpoint's folder. Every rank writes one file, and then a marker
    beside it with its length and checksum, or with an error. When rank 0 has seen all
    markers it runs `commit`. No collective is called but by `wait`, so a thread can do
    all of it.
    """

    def __init__(self, commit: Commit) -> None:
        self.path, self.commit = commit.path, commit
        self._file = commit.written / written_by(rank())
        self._error: Exception | None = None
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False
        busy.add(commit.nonce)

    def begin(self, tensors: list[LazyTensor], background: int) -> None:
        """Write at once what does not fit into `background` bytes.

        The rest is copied and written by a thread. What rests on a disk is never
        copied, so it has to come first.
        """
        size, room = len(tensors), background
        while size and tensors[size - 1].nbytes <= room:
            if tensors[size - 1].on_disk:
                break
            size -= 1
            room -= tensors[size].nbytes
        writer, rest = None, []
        try:
            writer = TensorWriter(self._file, tensors)
            for tensor in tensors[:size]:
                writer.write(tensor)
            rest = [copied(tensor) for tensor in tensors[size:]]
        except Exception as error:
            self._error = error
        except BaseException:  # an interrupt: this save is forgotten
            if writer is not None:
                writer.close()
            busy.discard(self.commit.nonce)
            raise
        if not background:
            self._write(writer, rest)
            return

        def behind() -> None:
            self._write(writer, rest)
            self._commit()

        self._thread = threading.Thread(target=behind, name="checkpoint")
        self._thread.start()

    def _write(self, writer: TensorWriter | None, rest: list[LazyTensor]) -> None:
        """Write the rest, and the marker; what an error has left goes first."""
        facts: dict[str, Any] = {}
        try:
            if writer is not None:
                with contextlib.closing(writer):
                    if self._error is None:
                        while rest:
                            writer.write(rest.pop(0))  # its copy goes too
                        writer.finish()
                        facts = {"bytes": writer.nbytes, "crc32": writer.crc32}
        except Exception as error:
            self._error = error
        try:
            if self._error is not None:
                facts = {"error": str(self._error) or repr(self._error)}
                with contextlib.suppress(OSError):
                    self._file.unlink(missing_ok=True)
            leave_marker(self._file, facts)
        except Exception as error:
            self._error = self._error or error
        finally:
            self._written.set()

    def _commit(self) -> None:
        if rank() == 0:
            try:
                self.commit.run()
            except Exception as error:
                self._error = self._error or error

    def wait(self) -> None:
        """Return when the checkpoint is complete: on every rank or on none.

        A collective. Raises CheckpointError, in the same words on all ranks, if any of
        them failed; the checkpoint before this one is then whole. A second call does
        nothing.
        """
        if self._over:
            return
        self._over = True
        try:
            self._written.wait()
            try:
                self._agree()  # that all files are written
            except BaseException:  # a dead peer raises no CheckpointError
                self.commit.abandoned.set()
                raise
            finally:
                if self._thread is not None:
                    self._thread.join()
                else:
                    self._commit()
                busy.discard(self.commit.nonce)
            self._agree()  # that rank 0 has committed
        finally:
            # it knows the stack it came through, and with that the net
            self._error = None

    def _agree(self) -> None:
        error = self._error
        if isinstance(error, OSError):
            error = explained(self.path, error)
        agree(error, CheckpointError)
