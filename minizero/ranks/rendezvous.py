"""How a process becomes one of the ranks, asks which one it is, and stops being one.

A script that `torchrun` starts calls `init_distributed` first; then it is the same
program as a function that `launch` runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

TIMEOUT = 300.0  # seconds without progress after which ranks count as hanging
ACCELERATOR = "cuda"  # tests set the name of a pretended one


def prepare() -> None:
    """Ask for huge pages (fewer page faults) and for batch scheduling."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read at the first large tensor
    with contextlib.suppress(AttributeError, OSError):  # Linux's; gloo's thread spins
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if "WORLD_SIZE" in os.environ:  # of torchrun, whose script may join by itself
    prepare()


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
    if wanted == "nccl" and gpus < ranks:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each rank, and there are {gpus} GPUs for "
            f"{ranks} ranks; choose 'gloo' or start fewer ranks."
        )
    return wanted or ("nccl" if gpus >= ranks else "gloo")


def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    *,
    dist_backend: str | None = None,
) -> None:
    """Make this process a rank, if it is not one yet.

    Within `launch` and `Pool` there is nothing to do, whatever the arguments. Under
    torchrun the environment says which rank of how many. Else it is rank 0 of 1.
    `backend`, or DeepSpeed's `dist_backend`: "nccl", "gloo", or None for nccl where each
    rank has its own GPU. `timeout`: seconds that a collective may take, or a timedelta.
    """
    if not dist.is_initialized():
        here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
        chosen = choose_backend(backend or dist_backend, int(here))
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=TIMEOUT if timeout is None else timeout)
        join(chosen, timeout)
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
                    if found[20:24] == mine:  # ifreq: the name, family, port, address
                        os.environ["GLOO_SOCKET_IFNAME"] = name


def join(backend: str, timeout: timedelta) -> None:
    """Make this process one of the ranks, as its environment says (see torchrun's)."""
    choose_interface()
    prepare()
    own, ranks = os.environ, os.environ.get("WORLD_SIZE", "1")
    store: Store | None = None
    if "WORLD_SIZE" not in own:
        store = HashStore()  # alone
    elif "TORCHELASTIC_RESTART_COUNT" in own and own["LOCAL_WORLD_SIZE"] == ranks:
        # torchrun keeps its store when it starts ranks again, and in it the addresses
        # of dead ones (PyTorch's issue 135712); nodes may count restarts differently
        host, port = own["MASTER_ADDR"], int(own["MASTER_PORT"])
        kept = TCPStore(host, port, is_master=False, timeout=timeout)
        store = PrefixStore(own["TORCHELASTIC_RESTART_COUNT"], kept)
    gpu: torch.device | None = None
    if torch.cuda.is_available():
        local = int(own.get("LOCAL_RANK", "0"))
        gpu = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    nccl = backend == "nccl"
    dist.init_process_group(
        # NCCL moves no host memory, where models may live too
        "cpu:gloo,cuda:nccl" if nccl else backend,
        device_id=gpu if nccl else None,
        store=store,
        rank=int(own.get("RANK", "0")),
        world_size=int(ranks),
        timeout=timeout,
    )


def leave() -> None:
    """End the process group. Without it some runs abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # groups that are held by cycles, too
