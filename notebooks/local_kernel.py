"""How the tests run notebooks; their conftest imports this.

A kernel and its ranks import torch and more, which takes ten seconds of a core. Here
they are forks of one process that has imported it all, the fork server that ranks come
from anyway.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from typing import Any

import nbval.kernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

from minizero.ranks import pool, worker

INLINE = "module://matplotlib_inline.backend_inline"


def local_kernel(**how: Any) -> KernelManager:
    """A kernel that is reached by sockets in a folder.

    Of ports, one may be taken by a rank of another test, after it was chosen and
    before the kernel listens at it; then the kernel dies.
    """
    folder = tempfile.TemporaryDirectory(prefix="kernel-")
    file = f"{folder.name}/kernel.json"
    manager = KernelManager(connection_file=file, transport="ipc", **how)
    manager.folder = folder  # it goes with the manager
    return manager


class Kernel(multiprocessing.get_context("forkserver").Process):
    """A kernel's process, with what a manager asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)


def launch(command: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> Kernel:
    """What Jupyter calls to start a kernel."""
    server: Any = forkserver._forkserver
    with pool._without_main_script():
        # but for transformers, which obeys the environment that a chapter sets first
        ours = [m for m in server._preload_modules if not m.startswith("minizero.hf")]
        modules = [*ours, "matplotlib.pyplot", "ipykernel.kernelapp"]
        multiprocessing.set_forkserver_preload(modules)
        forkserver.ensure_running()
        address = server._forkserver_address
        kernel = Kernel(target=serve, args=(command[3:], cwd, env, address))
        kernel.start()
    while os.getpgid(kernel.pid) != kernel.pid:  # the manager takes note of its group
        time.sleep(0.01)
    return kernel


def serve(arguments: list[str], cwd: str, env: dict[str, str], address: str) -> None:
    """The life of a kernel."""
    gc.freeze()  # as a rank does
    os.setsid()
    os.chdir(cwd)
    sys.path[0] = ""
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # the parent's folder, which goes with it; a rank deletes that of its own parent
    folder = multiprocessing.current_process()._config.pop("tempdir")
    end = threading.Thread(target=worker._end_with_parent, args=(folder,), daemon=True)
    end.start()
    # its ranks come from the server that it comes from
    server: Any = forkserver._forkserver
    server._forkserver_address, server.ensure_running = address, lambda: None
    from ipykernel.kernelapp import IPKernelApp
    from matplotlib import rcParams

    rcParams["backend"] = INLINE
    try:
        IPKernelApp.launch_instance(argv=arguments)
    finally:
        atexit._run_exitfuncs()  # a fork's are not run


def is_thorough(item: Any) -> bool:
    """Cells of the book's pages and of solutions, and those tagged `thorough`."""
    if (cell := getattr(item, "cell", None)) is None:
        return False
    if item.path.parent.name == "book":
        return True
    cells = item.parent.nb.cells[: item.parent.nb.cells.index(cell)]
    heads = re.findall("^## .*", "\n".join(c.source for c in cells), re.MULTILINE)
    tags = cell.metadata.get("tags", [])
    return "thorough" in tags or heads[-1:] == ["## Exercises"]


nbval.kernel.KernelManager = local_kernel
local_provisioner.launch_kernel = launch
