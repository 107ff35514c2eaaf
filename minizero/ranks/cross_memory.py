"""One rank reads the memory of another, where all are on one machine.

Gloo moves every byte through a socket: it is copied twice, and the kernel does more
about it than about the copies; a message also wakes a thread on either side. Linux lets
a process read from another one of its user at once ("cross-memory attach",
process_vm_readv(2); MPI libraries use it as well).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
if _libc is not None:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t

SPIN = 2e-4  # seconds of waiting in which a rank looks all the time
_ENTRY, _NUMBER = struct.Struct("=4q"), struct.Struct("=q")
NEAR = 8
PLACES = (1 << 11) + NEAR
"""For what is offered to one rank. Where a tag is looked for, NEAR of them."""


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Offer(NamedTuple):
    """A message that may be read: its number, the place of its entry, its address."""

    number: int
    place: int
    start: int


class _Peer(NamedTuple):
    """A rank: its process, and the addresses of its desk's two tables."""

    process: int
    offered: int
    taken: int


class Desk:
    """What a rank offers to each other one, and what it has taken from each.

    A rank writes into its own memory only. An offer is an entry of four numbers: its
    own, a tag, an address, and the three combined, by which a reader knows that it has
    not met it half written. Who has taken it writes its number at the same place of
    another table, where the one that has offered it looks.
    """

    def __init__(self, timeout: float) -> None:
        self._me, ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout
        self._offered = ctypes.create_string_buffer(ranks * PLACES * _ENTRY.size)
        self._taken = ctypes.create_string_buffer(ranks * PLACES * _NUMBER.size)
        self._used: set[tuple[int, int]] = set()  # ranks and places
        # so large that memory which is used otherwise has none of them by chance
        self._numbers = count(secrets.randbits(61) | 1 << 61)
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []

    def meet(self) -> bool:
        """All ranks find out, together, whether each can read every other."""
        name = next(self._numbers)  # tells it from a process of its id elsewhere
        _NUMBER.pack_into(self._taken, 0, name)
        tables = ctypes.addressof(self._offered), ctypes.addressof(self._taken)
        mine = torch.tensor([os.getpid(), *tables, name], device="cpu")
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        told = [each.tolist() for each in every]
        self._peers = [_Peer(*place) for *place, _ in told]
        found = [_copied(one.process, one.taken, _NUMBER.size) for one in self._peers]
        names = [_NUMBER.pack(name) for *_, name in told]
        can = torch.tensor([int(found == names)], device="cpu")
        dist.all_reduce(can, dist.ReduceOp.MIN)
        return bool(can)

    def offer(self, rank: int, tag: int, start: int) -> Offer:
        """Lets a rank read from the address `start` on, until it has taken that."""
        first = tag % (PLACES - NEAR)
        with self._lock:
            near = ((rank, place) for place in range(first, first + NEAR))
            free = next((each for each in near if each not in self._used), None)
            if free is None:
                raise RuntimeError(
                    f"{len(self._used)} large messages of this rank have been launched "
                    "and not been waited for; wait for some before launching more"
                )
            self._used.add(free)
            offer = Offer(next(self._numbers), free[1], start)
        # a processor may not write this before what was written before that lock
        with self._lock:
            entry = offer.number, tag, start, offer.number ^ tag ^ start
            _ENTRY.pack_into(self._offered, _at(_ENTRY, *free), *entry)
        return offer

    def until_taken(self, rank: int, offer: Offer) -> None:
        """Returns when that rank has taken what was offered."""
        at = self._peers[rank].taken + _at(_NUMBER, self._me, offer.place)
        number = _NUMBER.pack(offer.number)
        self._until(lambda: self._seen(rank, at, _NUMBER.size) == number or None)
        self._used.remove((rank, offer.place))

    def find(self, rank: int, tag: int) -> Offer:
        """What that rank offers with this tag, as soon as it does; the first of it."""
        first = tag % (PLACES - NEAR)
        at = self._peers[rank].offered + _at(_ENTRY, self._me, first)

        def look() -> Offer | None:
            entries = _ENTRY.iter_unpack(self._seen(rank, at, NEAR * _ENTRY.size))
            offers = [
                Offer(number, place, start)
                for place, (number, its, start, check) in enumerate(entries, first)
                if its == tag and check == number ^ tag ^ start
            ]
            return min((o for o in offers if not self._has(rank, o)), default=None)

        return self._until(look)

    def _has(self, rank: int, offer: Offer) -> bool:
        at = _at(_NUMBER, rank, offer.place)
        return _NUMBER.unpack_from(self._taken, at) == (offer.number,)

    def take(self, rank: int, offer: Offer) -> None:
        """That rank need not keep it any longer."""
        _NUMBER.pack_into(self._taken, _at(_NUMBER, rank, offer.place), offer.number)

    def read(self, rank: int, start: int, into: Tensor) -> None:
        """Fills `into`, contiguous, with what is at the address `start` of a rank."""
        if not _copy(self._peers[rank].process, start, into.data_ptr(), into.nbytes):
            raise _gone(rank)

    def _seen(self, rank: int, start: int, size: int) -> bytes:
        found = _copied(self._peers[rank].process, start, size)
        if found is None:
            raise _gone(rank)
        return found

    def _until(self, look: Callable[[], T | None]) -> T:
        """What `look` finds, as soon as it does."""
        begun = time.monotonic()
        while (found := look()) is None:
            waited = time.monotonic() - begun
            if waited > self._timeout:
                raise RuntimeError(f"Timed out waiting {waited:.0f} s for a rank")
            if waited < SPIN:
                os.sched_yield()  # others may have no core else
            else:
                time.sleep(min(waited / 16, 1e-3))
        return found


_desk: Desk | None = None
_met: dist.ProcessGroup | None = None  # whose ranks can read each other


def meet(timeout: float) -> None:
    """All ranks find out, together, whether each can read the memory of every other.

    They cannot on several machines, in containers of their own, on another system than
    Linux, or where that forbids it. `timeout`: the most seconds that one waits.
    """
    global _met, _desk
    _met = _desk = None
    if _libc is None or dist.get_world_size() == 1:
        return
    set_ptracer, anybody = 0x59616D61, ctypes.c_ulong(-1)
    _libc.prctl(set_ptracer, anybody, 0, 0, 0)  # some systems ask the one that is read
    _desk = Desk(timeout)
    if _desk.meet():
        _met = dist.group.WORLD


def readable() -> bool:
    """Whether ranks can read each other's memory."""
    return _met is not None and _met is dist.group.WORLD


def desk() -> Desk:
    """This rank's, where ranks can read each other."""
    assert _desk is not None
    return _desk


def _gone(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed: rank {rank} cannot be read, or has ended")


def _at(kind: struct.Struct, rank: int, place: int) -> int:
    """Where a table has what concerns a rank."""
    return (rank * PLACES + place) * kind.size


def _copied(process: int, start: int, size: int) -> bytes | None:
    """Bytes of a process; None if it cannot be read."""
    into = ctypes.create_string_buffer(size)
    return into.raw if _copy(process, start, ctypes.addressof(into), size) else None


def _copy(process: int, start: int, into: int, size: int) -> bool:
    """Whether all of it could be read."""
    assert _libc is not None
    done = 0
    while done < size:  # a call copies 2 GB at most
        here = _Span(into + done, size - done)
        there = _Span(start + done, size - done)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        spans = ctypes.byref(here), one, ctypes.byref(there), one
        copied = _libc.process_vm_readv(process, *spans, none)
        if copied <= 0:
            return False
        done += copied
    return True
