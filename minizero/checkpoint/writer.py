"""A save under way: what each rank writes, now or in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..comm.agreement import agree
from ..memory.bytes import aligned, host_empty
from ..offload.copy_streams import CopyEvent, CopyStream, DoubleBuffer
from ..ranks.launch import rank
from .commit import Commit, busy, leave_marker, written_by
from .tensor_file import CHUNK, CheckpointError, LazyTensor, TensorWriter, explained


def on_gpu(tensor: Tensor) -> bool:
    """Whether a copy to host memory goes over a bus."""
    return tensor.is_cuda


class ReadAhead:
    """Reads a device's tensor piece by piece: the next comes while one is written."""

    def __init__(self, source: Tensor, stream: CopyStream, blocks: DoubleBuffer) -> None:
        self.source, self.stream, self.blocks = source, stream, blocks
        self._coming: dict[int, tuple[Tensor, CopyEvent]] = {}

    def __call__(self, a: int, b: int) -> Tensor:
        """Elements a to b, page-locked; valid until the call after the next."""
        if a not in self._coming:
            self._launch(a, b)
        piece, event = self._coming.pop(a)
        if b < self.source.numel():
            self._launch(b, min(2 * b - a, self.source.numel()))
        event.wait("cpu")
        return piece

    def _launch(self, a: int, b: int) -> None:
        self.blocks.turn()
        piece = self.blocks.take(self.source[a:b])
        self.stream.copy(piece, self.source[a:b])
        self._coming[a] = piece, self.stream.event()


def read_ahead(tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """The same tensors; those on a GPU are read over its bus, beside the writing."""
    if not any(t.steady is not None and on_gpu(t.steady) for t in tensors):
        return [*tensors]
    stream, blocks = CopyStream(), DoubleBuffer(CHUNK, "cpu", torch.device("cpu"))
    stream.follow()
    return [
        replace(t, read=ReadAhead(t.steady, stream, blocks))
        if t.steady is not None and on_gpu(t.steady)
        else t
        for t in tensors
    ]


class HostCopies:
    """Copies of tensors in one block of host memory, page-locked where that helps.

    What only an update changes is copied beside forward and backward: the next update
    is to wait until it is `done`.
    """

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        memory, start = host_empty((nbytes,), torch.uint8, "buffers"), 0
        stream = CopyStream()
        stream.follow()
        self.tensors: list[LazyTensor] = []
        for tensor in tensors:
            part = memory[start : start + tensor.nbytes].view(tensor.dtype)
            start += aligned(tensor.nbytes)
            if tensor.steady is not None:
                stream.copy(part, tensor.steady)
            else:
                for a, b in tensor.pieces():
                    part[a:b] = tensor.read(a, b)
            read = partial(_part, part)
            self.tensors.append(replace(tensor, read=read, steady=None))
        self.done = stream.event()


def _part(tensor: Tensor, a: int, b: int) -> Tensor:
    return tensor[a:b]


class Saving:
    """A save that was begun; `wait()` says that it is complete.

    `path`: the checkpoint's folder. Every rank writes one file, and then a marker
    beside it with its length and checksum, or with an error. When rank 0 has seen all
    markers it runs `commit`. No collective is called but by `wait`, so a thread can do
    all of it. `said`: the index's checksum, which is in every file.
    """

    def __init__(self, commit: Commit, said: str) -> None:
        self.path, self.commit = commit.path, commit
        self._file = commit.written / written_by(rank())
        self._owner = f"{self._file.name} {said}"
        self._error: Exception | None = None
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self._copies: HostCopies | None = None
        self._hook: RemovableHandle | None = None
        self._over = False
        busy.add(commit.nonce)

    def begin(
        self,
        tensors: list[LazyTensor],
        background: int,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Write at once what does not fit into `background` bytes.

        The rest is copied and written by a thread. What rests on a disk is never
        copied, so it has to come first.
        """
        size, room = len(tensors), background
        while size and not tensors[size - 1].on_disk:
            room -= aligned(tensors[size - 1].nbytes)
            if room < 0:
                break
            size -= 1
        writer = None
        try:
            writer = TensorWriter(self._file, tensors, owner=self._owner)
            for tensor in read_ahead(tensors[:size]):
                writer.write(tensor)
            if background:
                self._copies = HostCopies(tensors[size:])
                done = self._copies.done
                self._hook = optimizer.register_step_pre_hook(
                    lambda *_: done.wait("device")
                )
        except Exception as error:
            self._error = error
        except BaseException:  # an interrupt: this save is forgotten
            if writer is not None:
                writer.close()
            busy.discard(self.commit.nonce)
            raise
        if not background:
            self._write(writer)
            return

        def behind() -> None:
            self._write(writer)
            self._commit()

        self._thread = threading.Thread(target=behind, name="checkpoint")
        self._thread.start()

    def _write(self, writer: TensorWriter | None) -> None:
        """Write the rest, and the marker; what an error has left goes first."""
        facts: dict[str, Any] = {}
        try:
            if writer is not None:
                with contextlib.closing(writer):
                    if self._error is None:
                        self._write_copies(writer)
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

    def _write_copies(self, writer: TensorWriter) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.done.wait("cpu")
            for tensor in copies.tensors:
                writer.write(tensor)

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
                if self._hook is not None:
                    self._hook.remove()  # not in the thread: a step may go by it
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
