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

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from .reports import one_rank_speaks

TIMEOUT = 300.0  # seconds without progress after which ranks count as hanging
START = 600.0  # seconds that ranks may take to start: importing torch is slow


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
    """Make this process a rank, if it is not one yet.

    Within `launch` and `Pool` there is nothing to do. Under torchrun the environment
    says which rank of how many. Elsewhere the process is rank 0 of 1.

    Args:
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU.
        timeout: seconds that a collective may take, or a timedelta.
        dist_backend: DeepSpeed's name of `backend`.
    """
    one_rank_speaks()
    if not dist.is_initialized():
        here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
        chosen = choose_backend(backend or dist_backend, int(here))
        join(chosen, check_timeout(timeout))
        atexit.register(leave)


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

    A pool and torchrun have a store for that. Torchrun keeps it when it starts ranks anew:
    a quick rank would read the address of a dead one (PyTorch's issue 135712). So each rank leaves
    its own mark in a part of the store that rank 0 names, and rank 0 confirms all
    marks. Ranks may start at very different times, whatever a collective's timeout.
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
        f"not all of the {ranks} ranks have started in {START:g} s; see what the others "
        f"have printed, and whether a firewall keeps them from {host}."
    )


def join(backend: str, timeout: float) -> None:
    """Make this process one of the ranks, as its environment says: see torchrun's."""
    choose_interface()
    # torch reads this at its first large tensor: a new buffer costs far fewer page faults
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(AttributeError, OSError):  # it is Linux's
        # gloo's thread, which spins, does not take the core of the thread that it waits for
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
