"""Compiles `adam.cpp`, once for each version of it, of torch and of the processor."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("adam.cpp")

# What every processor of a capability has: on a cluster one home folder serves several,
# and -march=native would be that of the machine which happened to compile.
_MARCH = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4"]}


def flags() -> list[str]:
    """Options of the compiler.

    No contraction of a product and a sum, so that an element gets the same bits in the
    vectors of a loop, in its remainder, and in Triton's interpreter.
    """
    march = _MARCH.get(torch.backends.cpu.get_cpu_capability(), [])
    return ["-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", *march]


def missing() -> str:
    """A sentence that says what keeps it from being compiled; "" if nothing does."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    for program in (compiler, "ninja"):
        if shutil.which(program, path=_path()) is None:
            return (
                f"CPUAdam is compiled when it is first used, and there is no {program}; "
                "install a C++ compiler and ninja, or use AdamW, whose fused kernel is "
                "torch's own"
            )
    return ""


def _path() -> str:
    """Where programs are looked for: pip's ninja is beside this Python."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def _folder() -> Path:
    """Where what is compiled of this source, by these flags, stays."""
    key = [SOURCE.read_text(), torch.__version__, *flags()]
    name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "minizero" / f"adam-{name}"


@cache
def adam_step() -> Any:
    """The operator `torch.ops.minizero.adam_step`; the first call compiles it.

    Raises RuntimeError with a sentence where it cannot be.
    """
    folder = _folder()
    library = folder / "minizero_adam.so"
    if not library.exists():
        if told := missing():
            raise RuntimeError(told)
        folder.mkdir(parents=True, exist_ok=True)
        # the system frees it when its holder dies; torch's own lock is a file that stays
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
            _compile(folder)
    torch.ops.load_library(library)
    return torch.ops.minizero.adam_step


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    before = os.environ.get("PATH", "")
    os.environ["PATH"] = _path()
    try:
        cpp_extension.load(
            "minizero_adam",
            [str(SOURCE)],
            extra_cflags=flags(),
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"the C++ compiler did not accept {SOURCE.name} (above is what it said); "
            "use AdamW, whose fused kernel is torch's own"
        ) from error
    finally:
        os.environ["PATH"] = before
