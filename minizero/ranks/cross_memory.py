"""One rank reads the memory of another, where all are on one machine.

Gloo moves every byte through a socket: it is copied twice, and the kernel does more
about it than about the copies. Linux lets a process read from another one of its user
at once ("cross-memory attach", process_vm_readv(2); MPI libraries use it as well).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys

import torch
import torch.distributed as dist
from torch import Tensor

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
if _libc is not None:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
# Its value at its address tells this process from one of that number elsewhere.
_cookie = torch.tensor([secrets.randbits(63)], device="cpu")
_met: dist.ProcessGroup | None = None  # the ranks that have met can read each other
_processes: list[int] = []


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def meet() -> None:
    """All ranks find out, together, whether each can read the memory of every other.

    They cannot on several machines, in containers of their own, on another system than
    Linux, or where that forbids it.
    """
    global _met, _processes
    _met = None
    if _libc is None or dist.get_world_size() == 1:
        return
    set_ptracer, anybody = 0x59616D61, ctypes.c_ulong(-1)
    _libc.prctl(set_ptracer, anybody, 0, 0, 0)  # some systems ask the one that is read
    own = [os.getpid(), _cookie.data_ptr(), int(_cookie)]
    mine = torch.tensor(own, device="cpu")
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    told = [each.tolist() for each in every]
    _processes = [process for process, _, _ in told]
    can = torch.tensor([int(all(_is_there(*each) for each in told))], device="cpu")
    dist.all_reduce(can, dist.ReduceOp.MIN)
    _met = dist.group.WORLD if can else None


def _is_there(process: int, place: int, value: int) -> bool:
    found = torch.empty_like(_cookie)
    return _copy(process, place, found) and int(found) == value


def readable() -> bool:
    """Whether ranks can read each other's memory."""
    return _met is not None and _met is dist.group.WORLD


def read(rank: int, start: int, into: Tensor) -> None:
    """Fills `into`, contiguous, with what is at the address `start` of that rank."""
    if not _copy(_processes[rank], start, into):
        raise RuntimeError(
            f"Connection closed: rank {rank} cannot be read, or has ended"
        )


def _copy(process: int, start: int, into: Tensor) -> bool:
    """Whether all of it could be read."""
    assert _libc is not None
    done = 0
    while done < into.nbytes:  # a call copies 2 GB at most
        here = _Span(into.data_ptr() + done, into.nbytes - done)
        there = _Span(start + done, into.nbytes - done)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        spans = ctypes.byref(here), one, ctypes.byref(there), one
        copied = _libc.process_vm_readv(process, *spans, none)
        if copied <= 0:
            return False
        done += copied
    return True
