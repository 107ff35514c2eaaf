"""How the tests start a notebook's kernel; their conftest imports this."""

from __future__ import annotations

import tempfile
from typing import Any

import nbval.kernel
from jupyter_client.manager import KernelManager


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


nbval.kernel.KernelManager = local_kernel
