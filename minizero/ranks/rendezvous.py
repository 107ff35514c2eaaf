"""How a process becomes one of the ranks, and stops being one."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import os
import socket
import time
import uuid
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    Store,
    TCPStore,
)

TIMEOUT = 300.0  # seconds without progress after which ranks count as hanging
START = 600.0  # seconds that ranks may take to start: importing torch is slow


def choose_backend(wanted: str | None, ranks: int) -> str:
    """NCCL needs a GPU for each of the machine's ranks. Gloo always works."""
    gpus = torch.cuda.device_count()
    if wanted is None:
        return "nccl" if gpus >= ranks else "gloo"
    if wanted not in ("nccl", "gloo"):
        raise ValueError(f"backend is {wanted!r}; choose 'nccl', 'gloo' or None.")
    if wanted == "nccl" and gpus < ranks:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each rank, and there are {gpus} GPUs for "
            f"{ranks} ranks; choose 'gloo' or start fewer ranks."
        )
    return wanted


def check_timeout(timeout: float | None) -> float:
    """A timeout in seconds; the usual one for None."""
    if timeout is None:
        return TIMEOUT
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; give a positive number of seconds.")
    return timeout


def init_distributed(
    backend: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    *,
    dist_backend: str | None = None,
) -> None:
    """Makes this process a rank, if it is not one yet.

    Within `launch` and `Pool` there is nothing to do. Under torchrun the environment
    says which rank of how many. Elsewhere the process is rank 0 of 1.

    Args:
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU.
        timeout: seconds that a collective may take, or a timedelta.
        dist_backend: DeepSpeed's name of `backend`.
    """
    if dist.is_initialized():
        return
    backend = backend or dist_backend
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    ranks = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks)
    if here == ranks:
        use_loopback()
    else:
        use_network(os.environ.get("MASTER_ADDR", ""))
    join(choose_backend(backend, int(here)), check_timeout(timeout))
    atexit.register(leave)


def use_loopback() -> None:
    """Lets gloo talk within this machine, with or without a network."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


def use_network(master: str) -> None:
    """Lets gloo talk to other machines, over the network to rank 0.

    Left alone, it takes the address that the host's own name has, and that
    is often a loopback address, which no other machine can reach.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if not given.startswith("lo"):
        return  # a choice; "lo" is inherited from a process alone
    with contextlib.suppress(ImportError, OSError):
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # chooses a route, and sends nothing
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                query = name.encode().ljust(256, b"\0")
                with contextlib.suppress(OSError):  # it has no address
                    found = ioctl(probe.fileno(), _SIOCGIFADDR, query)
                    if found[20:24] == mine:
                        os.environ["GLOO_SOCKET_IFNAME"] = name


def _fresh_store() -> Store:
    """Where the ranks of this start leave their addresses for each other.

    Torchrun has a store for that, but keeps it when it starts the ranks
    anew: a quick rank would read the address of one that is dead (PyTorch's
    issue 135712). So rank 0 opens one that ends with it, and torchrun's only
    says where. It is returned when all ranks have found it: they may start
    at very different times, even where a collective's timeout is short.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = datetime.timedelta(seconds=START)
    kept = TCPStore(host, port, is_master=False, timeout=patience)
    if os.environ["RANK"] == "0":
        store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=patience
        )
        name = uuid.uuid4().hex
        store.set("name", name)
        kept.set("minizero", f"{store.port} {name}")
    else:
        store = _find_store(kept, host)
    here = store.add("here", 1)
    if here == int(os.environ["WORLD_SIZE"]):
        store.set("all", "here")
    try:
        store.wait(["all"])
    except dist.DistStoreError:  # it has waited too long
        raise RuntimeError(
            f"{store.add('here', 0)} of {os.environ['WORLD_SIZE']} ranks "
            f"have started in {START:g} s; see what the others have printed."
        ) from None
    return store


def _find_store(kept: Store, host: str) -> TCPStore:
    """The store that rank 0 of this start has opened, or will open."""
    patience = datetime.timedelta(seconds=START)
    end = time.monotonic() + START
    while time.monotonic() < end:
        time.sleep(0.05)
        if not kept.check(["minizero"]):
            continue
        found, name = kept.get("minizero").decode().split()
        # nothing answers there if it is of a start that is over
        with contextlib.suppress(OSError, dist.DistError):
            socket.create_connection((host, int(found)), 1.0).close()
            store = TCPStore(host, int(found), is_master=False, timeout=patience)
            if store.check(["name"]) and store.get("name") == name.encode():
                return store
    raise RuntimeError(
        f"rank {os.environ['RANK']} has not found rank 0 at {host} in "
        f"{START:g} s; see whether rank 0 has started, and whether a "
        "firewall is between them."
    )


def join(backend: str, timeout: float, rendezvous: str | None = None) -> None:
    """Makes this process one of the ranks, as its environment names it.

    The ranks find each other through the file `rendezvous`, or else as
    torchrun says.
    """
    # Buffers come and go in a step, and their memory goes back to the system. Torch, which
    # reads this at its first tensor, asks for huge pages: else a new buffer costs a fault
    # for every 4 KiB, which is many times what it costs to fill it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    store: Store | None = None
    if rendezvous is not None:
        store = FileStore(rendezvous, ranks)
    elif "WORLD_SIZE" not in os.environ:
        store = HashStore()  # alone
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _fresh_store()
    gpu: torch.device | None = None
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        gpu = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    nccl = backend == "nccl"
    with contextlib.nullcontext() if nccl else _batch_threads():
        dist.init_process_group(
            # NCCL moves no host memory, where models may live too
            "cpu:gloo,cuda:nccl" if nccl else backend,
            device_id=gpu if nccl else None,
            store=store,
            rank=int(os.environ.get("RANK", "0")),
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )


@contextlib.contextmanager
def _batch_threads() -> Iterator[None]:
    """Threads that are started inside wait their turn on a core, on Linux.

    Gloo's thread wakes for each message, and spins as long as another thread holds its
    connection's lock. Where ranks share few cores, it would take the core from the very
    thread that holds it.
    """
    normal = getattr(os, "SCHED_OTHER", None)
    if normal is None or os.sched_getscheduler(0) != normal:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, normal, os.sched_param(0))


def leave() -> None:
    """Ends the process group. Without it some runs abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
