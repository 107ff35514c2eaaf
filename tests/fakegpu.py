"""A GPU that is not there: fake tensors on a device of their own, and streams that
record who waits for whom.

`FakeGPU` makes this process one of N ranks with a GPU and NCCL. Tensors have shapes and
no elements; an operation that mixes devices raises. Each operation, copy, collective
and transfer of a file is put down as an access to the bytes of a storage, by a stream,
the host or a disk, together with all that it comes after (a vector clock). An access
that does not come after the last write to its bytes (or a write not after the last
reads, or a free not after everything) is a race, and an entry in `faults`.

It changes torch for the whole process: use it in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import minizero.comm.transport
import minizero.memory.labels
import minizero.offload.delayed
import minizero.offload.disk
import minizero.offload.swap_file
import minizero.zero.seams
from minizero.ranks import device

NAME = "fakegpu"
Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    for who, when in other.items():
        clock[who] = max(clock.get(who, 0), when)


@dataclass
class Access:
    """Bytes a to b of a storage, touched by `who` as its `when`-th act."""

    a: int
    b: int
    who: str
    when: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.who, 0) >= self.when


@dataclass
class Memory:
    """A storage, while it lives: its accesses, and where it was allocated.

    `owner`: the stream that its memory belongs to, as torch's allocator has it; None
    for host memory. `registered`: page-locked, and nobody waits when it is freed.
    """

    owner: Stream | None
    nbytes: int
    pinned: bool = False
    registered: bool = False
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class Stream:
    """Stands for torch.cuda.Stream: acts in turn, each after what it has waited for."""

    made = 0

    def __init__(self, device: Any = None, name: str = "") -> None:
        Stream.made += 1
        self.name = name or f"stream {Stream.made}"
        self.clock: Clock = {}

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        GPU.now.host_waits(self.clock, f"synchronize {self.name}")


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or GPU.now.stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or GPU.now.stream).wait_event(self)

    def query(self) -> bool:
        return all(GPU.now.host.get(w, 0) >= n for w, n in self.clock.items())

    def synchronize(self) -> None:
        GPU.now.host_waits(self.clock, "synchronize event")


class Done:
    """Stands for a collective, a transfer or a future: its results are there after."""

    def __init__(
        self, clock: Clock, on_host: bool, value: Any = None, kept: Any = None
    ) -> None:
        self.clock, self.on_host, self.value = clock, on_host, value
        self.kept = kept  # torch keeps a collective's tensors until then

    def wait(self) -> None:
        clock = GPU.now.clock if self.on_host else GPU.now.stream.clock
        join(clock, self.clock)
        self.kept = None

    synchronize = wait

    def result(self) -> Any:
        self.wait()
        return self.value


class Module:
    """What torch asks of a device's module."""

    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.zeros(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)


class GPU(TorchDispatchMode):
    """The recorder: see the module. `faults` are races; `syncs` what the host waited
    for."""

    now: GPU

    def __init__(self) -> None:
        super().__init__()
        GPU.now = self
        self.memories: dict[int, Memory] = {}
        self.host: Clock = {}
        self.worker: tuple[str, Clock] | None = None
        self.stream = self.default = Stream(name="compute")
        self.queues: dict[Any, Stream] = {}
        self.faults: list[str] = []
        self.syncs: list[str] = []
        self._ends: list[Any] = []

    # Who acts, and after what.

    @property
    def clock(self) -> Clock:
        """Of the thread that runs: the host's program, or a worker."""
        return self.host if self.worker is None else self.worker[1]

    def record(
        self,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        stream: Stream | None = None,
    ) -> None:
        """An act of a stream, or of the thread that runs."""
        thread = "host" if self.worker is None else self.worker[0]
        who, clock = (stream.name, stream.clock) if stream else (thread, self.clock)
        join(clock, self.clock)  # launched after what the host knows
        clock[who] = clock.get(who, 0) + 1
        for tensors, write in ((reads, False), (writes, True)):
            for x in tensors:
                # numbers of the host are a stream's arguments
                if write or not stream or x.dim() or x.device.type == NAME:
                    self.touch(x, write, who, clock, what)

    def host_waits(self, clock: Clock, what: str) -> None:
        self.syncs.append(what)
        join(self.clock, clock)

    # What is touched.

    def memory(self, t: Tensor) -> Memory:
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.memories:
            owner = self.stream if t.device.type == NAME else None
            self.memories[key] = found = Memory(owner, storage.nbytes())
            self._allocated(found)
            end = weakref.finalize(storage, self._freed, key)
            end.atexit = False
        return self.memories[key]

    def _allocated(self, memory: Memory) -> None:
        if memory.owner is not None:
            clock = memory.owner.clock
            last = clock.get(memory.owner.name, 0)
            # what had the memory before may be under way on that stream
            first = Access(0, 1 << 62, memory.owner.name, last, "allocation")
            memory.writes, memory.reads = [first], []

    def resized(self, storage: torch.UntypedStorage) -> None:
        memory = self.memories.get(storage._cdata)
        if memory is None:
            return
        grown, memory.nbytes = storage.nbytes() > memory.nbytes, storage.nbytes()
        if grown:
            memory.owner = self.stream
            self._allocated(memory)
        else:
            self._check_free(memory)

    def _freed(self, key: int) -> None:
        self._check_free(self.memories.pop(key))

    def _check_free(self, memory: Memory) -> None:
        # who gets it next is launched on its stream, after what the host knows now; of
        # host memory torch keeps count, and `page_locked` waits
        if memory.owner is not None:
            clock = dict(memory.owner.clock)
            join(clock, self.clock)
            for access in (*memory.reads, *memory.writes):
                if not access.before(clock):
                    self.faults.append(f"memory is freed while {access} may run")
        elif memory.registered:
            self.syncs.append("free of page-locked memory")
        memory.reads, memory.writes = [], []

    def touch(self, t: Tensor, write: bool, who: str, clock: Clock, what: str) -> None:
        """`who`, at `clock`, reads or writes the bytes of a tensor."""
        if not t.numel():
            return
        memory = self.memory(t)
        size = t.element_size()
        a = t.storage_offset() * size
        extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        this = Access(a, a + (extent + 1) * size, who, clock[who], f"{what} ({who})")
        if this.b > memory.nbytes:
            self.faults.append(f"{this} of a storage that is empty")
        others = (*memory.writes, *memory.reads) if write else memory.writes
        for other in others:
            if other.a < this.b and this.a < other.b and not other.before(clock):
                self.faults.append(
                    f"{'write' if write else 'read'}: {this} not after {other}"
                )
        kept = memory.writes if write else memory.reads
        if write:
            inside = [o for o in memory.reads if this.a <= o.a and o.b <= this.b]
            memory.reads[:] = [o for o in memory.reads if o not in inside]
        kept[:] = [
            o
            for o in kept
            if not (this.a <= o.a and o.b <= this.b and (write or o.who == this.who))
        ]
        kept.append(this)

    # Operations.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        ins = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if name in ("_local_scalar_dense", "equal", "allclose", "is_nonzero"):
            if any(x.device.type == NAME for x in ins):
                self.launch(name, ins, [])
                self.host_waits(self.stream.clock, name)
            return 0.0 if name == "_local_scalar_dense" else True
        known = {x.untyped_storage()._cdata for x in ins}
        for x in ins:
            self.memory(x)
        out = func(*args, **kwargs)
        outs = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        written = list(_written(func, args, kwargs))
        new = [x for x in outs if x.untyped_storage()._cdata not in known]
        for x in outs:
            self.memory(x)
        if kwargs.get("pin_memory"):
            self.pin(out, False)
        if not written and not new or name.startswith(("empty", "new_empty")):
            return out  # a view, or memory that nobody has written
        if name in ("copy_", "_to_copy"):
            self.copy(name, args, kwargs, written or new, ins)
        else:
            reads = [x for x in ins if all(x is not w for w in written)]
            self.launch(name, [*reads, *written], [*written, *new])
        return out

    def launch(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        on_gpu = any(x.device.type == NAME for x in (*reads, *writes))
        self.record(what, reads, writes, self.stream if on_gpu else None)

    def copy(
        self, name: str, args: Any, kwargs: Any, outs: list[Tensor], ins: list[Tensor]
    ) -> None:
        [out], source = outs, ins[-1]
        places = {x.device.type for x in (out, source)}
        asynchronous = kwargs.get("non_blocking", False)
        if name == "copy_" and len(args) > 2:
            asynchronous = args[2]
        if len(places) == 1:
            return self.launch(name, [source], [out])
        down = out.device.type == "cpu"
        host = out if down else source
        way = "copy to the host" if down else "copy to the device"
        self.record(way, [source], [out], self.stream)
        pinned = self.memory(host).pinned
        # from pageable memory a few bytes are taken over at once
        staged = not down and asynchronous and not pinned
        if staged:
            self.memory(host).reads.clear()
        elif not asynchronous or not pinned:
            self.host_waits(self.stream.clock, f"copy of {host.numel()} elements")

    # Collectives.

    def collective(self, what: str, out: Tensor, inp: Tensor, group: Any) -> Done:
        if out.device.type == "cpu":
            self.record(what, [inp], [out])
            return Done(dict(self.clock), True)
        queue = self.queues.setdefault(group, Stream(name=f"nccl {len(self.queues)}"))
        queue.wait_stream(self.stream)
        self.record(what, [inp], [out], queue)
        return Done(dict(queue.clock), False, kept=(inp, out))

    def pin(self, t: Tensor, registered: bool) -> Tensor:
        memory = self.memory(t)
        memory.pinned, memory.registered = True, registered
        return t


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_iter(value) if isinstance(x, Tensor))


# Stand-ins for what the package calls.


def _collective(name: str) -> Callable[..., Done]:
    """A function of `dist`: into the first tensor, from the second."""

    def called(out: Tensor, inp: Any, *rest: Any, **options: Any) -> Done:
        group = options.get("group", rest[-1] if rest else None)
        inp = inp if isinstance(inp, Tensor) else out
        return GPU.now.collective(name, out, inp, group)

    return called


def _post(
    sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
) -> list[Done]:
    """Messages of host memory."""
    GPU.now.record("exchange", [*sends.values()], [*receives.values()])
    return [Done(dict(GPU.now.clock), True)]


class Inline:
    """Stands for the thread of a delayed update: it runs at once, and counts as beside
    what follows until its result is asked for."""

    def __init__(self, *_: Any) -> None:
        self.clock: Clock = {}

    def submit(self, fn: Callable[..., Any], *args: Any) -> Done:
        gpu = GPU.now
        join(self.clock, gpu.host)
        gpu.worker = ("update", self.clock)
        try:
            value = fn(*args)
        finally:
            gpu.worker = None
        return Done(dict(self.clock), True, value)

    def shutdown(self) -> None:
        pass


class Swap:
    """Stands for the swap file: a read writes its buffer, until it is waited for."""

    direct, size = True, 0

    def __init__(self, folder: Any, block_size: int, queue_depth: int) -> None:
        self.clocks: list[Clock] = []

    def allocate(self, nbytes: int) -> int:
        return 0

    def free(self, at: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _transfer(self, buffer: Tensor, write: bool) -> Done:
        clock = dict(GPU.now.clock)
        who = f"disk {len(self.clocks)}"
        self.clocks.append(clock)
        clock[who] = 1
        GPU.now.touch(buffer, write, who, clock, "transfer of the disk")
        return Done(clock, True)

    def read(self, offset: int, buffer: Tensor) -> Done:
        return self._transfer(buffer, True)

    def write(self, offset: int, buffer: Tensor) -> Done:
        return self._transfer(buffer, False)


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = GPU.now.stream
    GPU.now.stream = stream or before
    try:
        yield
    finally:
        GPU.now.stream = before


def _page_locked(count: int, dtype: torch.dtype) -> Tensor:
    return GPU.now.pin(torch.empty(count, dtype=dtype, device="cpu"), True)


def install(rank: int, ranks: int) -> None:
    """Make this process one of `ranks` with a GPU each, for good."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    cuda = torch.cuda
    for name, stand_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: [
            GPU.now.host_waits(dict(s.clock), "synchronize")
            for s in (GPU.now.default, *GPU.now.queues.values())
        ],
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: GPU.now.stream,
        "default_stream": lambda device=None: GPU.now.default,
        "stream": _stream,
    }.items():
        setattr(cuda, name, stand_in)
    sys.modules[device.__module__].ACCELERATOR = NAME  # type: ignore[attr-defined]
    transport = minizero.comm.transport
    dist.get_backend_config = lambda world: f"cpu:gloo,{NAME}:nccl"
    transport._post = _post
    transport._all_gather = _collective("all_gather")
    transport._reduce_scatter = _collective("reduce_scatter")
    dist.all_reduce, dist.broadcast = map(_collective, ("all_reduce", "broadcast"))
    dist.new_group = lambda *args, **options: object()
    minizero.memory.labels.page_locked = _page_locked
    minizero.offload.delayed.ThreadPoolExecutor = Inline
    minizero.offload.disk.SwapFile = Swap
    resize_ = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = resize_(storage, nbytes)
        GPU.now.resized(storage)
        return out

    torch.UntypedStorage.resize_ = resized
    torch.Tensor.record_stream = lambda t, stream: GPU.now.faults.append(
        "record_stream"
    )
    # the guard of such a device asks Python for its type: not in autograd's threads
    torch.autograd.set_multithreading_enabled(False).__enter__()
    # it tries optimizers on elements, and there are none
    minizero.zero.seams.check_elementwise = lambda *args: None
    # a fake parameter cannot be exchanged; models are made where they are to be
    torch.nn.Module.to = lambda module, *args, **options: module


@contextlib.contextmanager
def recording() -> Iterator[GPU]:
    """Fake tensors, and the record of what is done to them."""
    gpu = GPU()
    with FakeTensorMode(allow_non_fake_inputs=True), gpu:
        yield gpu
