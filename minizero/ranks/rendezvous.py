"""How a process becomes one of the ranks, asks which one it is, and stops being one.

A script that `torchrun` starts calls `init_distributed` first; then it is the same
program as a function that `launch` runs.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import os
import socket
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from .reports import watch

TIMEOUT = 300.0  # seconds without progress after which ranks count as hanging
START = 600.0  # seconds that ranks may take to start: importing torch is slow
ACCELERATOR = "cuda"  # tests have one that is not there


def rank() -> int:
    """The number of this process among the ranks; 0 if it is alone."""
    return 0 if dist.group.WORLD is None else dist.group.WORLD.rank()


def world_size() -> int:
    """The number of ranks; 1 if this process is alone."""
    return 1 if dist.group.WORLD is None else dist.group.WORLD.size()


def device() -> torch.device:
    """Where this rank computes: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device(ACCELERATOR, torch.cuda.current_device())
    return torch.device("cpu")


def choose_backend(wanted: str | None, ranks: int) -> str:
    """NCCL needs a GPU for each of the machine's ranks. Gloo always works."""
    gpus = torch.cuda.device_count()
    if wanted not in ("nccl", "gloo", None):
        raise ValueError(f"backend is {wanted!r}; choose 'nccl', 'gloo' or None.")
    if wanted == "nccl" and gpus < ranks:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each rank, and there are {gpus} GPUs for "
            f"{ranks} ranks; choose 'gloo' or start fewer ranks."
        )
    return wanted or ("nccl" if gpus >= ranks else "gloo")


def check_timeout(timeout: float | datetime.timedelta | None) -> float:
    """A timeout in seconds; the usual one for None."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; give a positive number of seconds.")
    return TIMEOUT if timeout is None else timeout


def init_distributed(
    backend: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    *,
    dist_backend: str | None = None,
) -> None:
    """Make this process a rank, if it is not one yet, and report it if it is stuck.

    Within `launch` and `Pool` there is nothing to do. Under torchrun the environment
    says which rank of how many. Elsewhere the process is rank 0 of 1.

    Args:
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU.
        timeout: seconds that a collective may take, or a timedelta.
        dist_backend: DeepSpeed's name of `backend`.
    """
    if not dist.is_initialized():
        here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
        chosen = choose_backend(backend or dist_backend, int(here))
        join(chosen, check_timeout(timeout))
        atexit.register(leave)
    there = world_size() > 1 and "MASTER_ADDR" in os.environ
    if there and dist.get_backend() != "fake":
        watch(rank(), world_size())


def choose_interface() -> None:
    """Let gloo talk by the network interface that reaches the other ranks.

    By itself it takes the address of the host's own name: there may be none, or one
    that no other machine can reach.
    """
    everyone = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", everyone) == everyone:
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", (names or ["lo"])[0])
        return
    if not os.environ.get("GLOO_SOCKET_IFNAME", "lo").startswith("lo"):
        return  # it was chosen; "lo" is inherited from a process alone
    with contextlib.suppress(ImportError, OSError):
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))  # a route; it sends nothing
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                query = name.encode().ljust(256, b"\0")
                with contextlib.suppress(OSError):  # it has no address
                    found = ioctl(probe.fileno(), 0x8915, query)  # SIOCGIFADDR
                    if found[20:24] == mine:
                        os.environ["GLOO_SOCKET_IFNAME"] = name


def _fresh_store() -> Store:
    """Where the ranks of this start find each other.

    A pool and torchrun have a store for that. Torchrun keeps it when it starts ranks
    anew, and a quick rank would read the address of a dead one (PyTorch's issue
    135712). So rank 0 names a part of the store, each rank leaves a mark of its own
    there, and goes on when rank 0 has confirmed that mark among those of all ranks.
    Ranks may start at very different times, whatever a collective's timeout.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    me, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    patience = datetime.timedelta(seconds=START)
    kept = TCPStore(host, port, is_master=False, timeout=patience)
    mark, end = uuid.uuid4().hex, time.monotonic() + START
    if me == "0":
        kept.set("minizero", mark)
    everyone = [str(r) for r in range(ranks)]
    while time.monotonic() < end:
        if kept.check(["minizero"]):
            store = PrefixStore(kept.get("minizero").decode(), kept)
            store.set(me, mark)
            if me == "0" and store.check(everyone):
                store.set("all", " ".join(store.get(r).decode() for r in everyone))
            if store.check(["all"]) and mark in store.get("all").decode():
                return store
        time.sleep(0.05)
    raise RuntimeError(
        f"not all of the {ranks} ranks have started in {START:g} s; see what the "
        f"others have printed, and whether a firewall keeps them from {host}."
    )


def join(backend: str, timeout: float) -> None:
    """Make this process one of the ranks, as its environment says: see torchrun's."""
    choose_interface()
    # torch reads this at its first large tensor: new buffers cost fewer page faults
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(AttributeError, OSError):  # it is Linux's
        # gloo's thread, which spins, leaves the core to the thread that it waits for
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    store: Store | None = None
    if "WORLD_SIZE" not in os.environ:
        store = HashStore()  # alone
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _fresh_store()
    gpu: torch.device | None = None
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        gpu = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    nccl = backend == "nccl"
    dist.init_process_group(
        # NCCL moves no host memory, where models may live too
        "cpu:gloo,cuda:nccl" if nccl else backend,
        device_id=gpu if nccl else None,
        store=store,
        rank=int(os.environ.get("RANK", "0")),
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )


def leave() -> None:
    """End the process group. Without it some runs abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
