"""Runs answers, each in a process of its own with limits; leaves nothing of them.

`Sandbox` is the grader's side. It starts one process that imports torch and the
package, and never the exercises' references: `python -m minizero.lab.course.sandbox`.
That one forks for each answer, watches the fork and all that it starts, and ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from .exercise import ENDED, RAISES, ROOT, Exercise, define, observe

PACKAGE = ROOT / "minizero"
ANSWER, TASK, RESULT, OUTPUT = "answer.py", "task", "result.jsonl", "output"
FIXED = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}  # of the environment
LOOK = 0.05  # seconds between looks at a running answer
BLOCK = 4096  # bytes that a file or folder takes at least


@dataclass(frozen=True)
class Limits:
    """What one answer may take, with all processes that it starts."""

    seconds: float = 120
    memory: int = 4 << 30
    processes: int = 48
    disk: int = 64 << 20
    """Of each file, and of all files together."""


class Sandbox:
    """A process that runs answers one after another.

    It starts with the first answer, and ends with its `with` block.
    """

    def __enter__(self) -> Sandbox:
        self._folder = Path(tempfile.mkdtemp(prefix="course-"))
        self._process: subprocess.Popen[str] | None = None
        return self

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minizero.lab.course.sandbox"]
        told = {"PYTHONPATH": str(ROOT)} | FIXED
        return subprocess.Popen(
            [*command, str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=self._folder, env={**os.environ, **told}, start_new_session=True,
        )  # fmt: skip

    def __exit__(self, *error: object) -> None:
        if self._process:
            assert self._process.stdin and self._process.stdout
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # it ends with its input
            self._process.wait()
            self._process.stdout.close()
        delete(self._folder)

    def run(
        self, asked: Exercise, text: str, cases: list[Any], limits: Limits | None = None
    ) -> list[Any]:
        """What was observed of each case, or what ended the answer before."""
        limits = limits or Limits(seconds=asked.seconds * (1 + 3 * asked.on_ranks))
        job = Path(tempfile.mkdtemp(dir=self._folder))
        if shutil.disk_usage(job).free < 4 * limits.disk:
            raise OSError(f"{job.parent} has less than {4 * limits.disk >> 20} MB left")
        (job / ANSWER).write_text(text, errors="replace")
        (job / TASK).write_bytes(cloudpickle.dumps((asked.run, asked.answer, cases)))
        known = {"job": str(job), "needs": asked.needs, "limits": asdict(limits)}
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout
        how = ""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(known) + "\n")
            process.stdin.flush()
            how = process.stdout.readline().strip()
        if not how:  # something has ended the process, perhaps the answer
            process.wait()
            self._process = None
            how = "the process that ran it was ended"
        seen = list(results(job / RESULT))[: len(cases)]
        delete(job)
        return seen + [{ENDED: how}] * (len(cases) - len(seen))


def results(path: Path) -> Any:
    """The observations that an answer's process has written: not to be trusted."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.is_file() and not path.is_symlink():
            with path.open() as file:
                for line in file.read(1 << 20).splitlines():
                    yield json.loads(line)


def delete(folder: Path) -> None:
    """Delete a folder, also if an answer has closed some of it, or nested it deep."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, str(folder)], stderr=subprocess.DEVNULL, check=False)


def main() -> None:
    """Run jobs until the input ends; answer each with what ended it."""
    import torch._dynamo  # noqa: F401  each fork has it

    from minizero import offload, precision, scale  # noqa: F401
    from minizero.lab.course import drivers  # noqa: F401
    from minizero.ranks import pool

    fork = multiprocessing.get_context("fork")
    pool.Process = fork.Process  # ranks need not import torch again

    gc.freeze()  # a collection would copy the pages that forks share
    prctl(36, 1)  # what an answer leaves behind becomes a child of this process
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        order = json.loads(line)
        for name in order["needs"]:
            importlib.import_module(name)
        how = supervise(Path(order["job"]), Limits(**order["limits"]))
        with contextlib.suppress(BrokenPipeError):  # the grader has gone
            print(how, file=replies, flush=True)
    delete(Path(sys.argv[1]))  # the grader may have been killed


def supervise(job: Path, limits: Limits) -> str:
    """Run one job in a fork until it ends or exceeds a limit; what ended it."""
    pid, parent = os.fork(), os.getppid()
    if pid == 0:
        try:
            confine(job, limits)
            work(job)
        finally:
            os._exit(0)
    until, how = time.monotonic() + limits.seconds, ""
    pause = 0.005
    while not how and os.getppid() == parent:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            how = f"the process of the answer ended with {code}"
        elif time.monotonic() > until:
            how = f"it did not end in {limits.seconds:g} seconds"
        else:
            how = excess(limits, job)
            time.sleep(pause)
            pause = min(LOOK, 2 * pause)  # most answers end at once
    end_all()
    return how or "the grader has ended"


def excess(limits: Limits, job: Path) -> str:
    """Which limit the processes of the answer exceed, in words."""
    family = psutil.Process().children(recursive=True)
    if len(family) > limits.processes:
        return f"it started more than {limits.processes} processes"
    held = size = 0
    for each in family:
        with contextlib.suppress(psutil.Error, OSError):
            held += each.memory_info().rss
            for opened in os.scandir(f"/proc/{each.pid}/fd"):
                found = opened.stat()  # nameless files are in no folder
                size += found.st_size * (found.st_nlink == 0)
    if held > limits.memory:
        return f"it took more than {limits.memory >> 20} MB of memory"
    errors: list[Exception] = []
    try:
        for folder, folders, names in os.walk(job, onerror=errors.append):
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    size += max(BLOCK, os.lstat(os.path.join(folder, name)).st_size)
    except (OSError, RecursionError) as error:
        errors.append(error)
    if any(not isinstance(each, FileNotFoundError) for each in errors):
        return "it put files where they cannot be seen"
    if size > limits.disk:
        return f"it wrote more than {limits.disk >> 20} MB"
    return ""


def end_all() -> None:
    """Kill all children of this process, until there are none."""
    while True:
        for child in psutil.Process().children(recursive=False):
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)  # at once, if it leads a group
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def confine(job: Path, limits: Limits) -> None:
    """Limit this process, and what it starts, to its folder and its share."""
    os.setsid()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).unshare(0x0800_0000)  # root's: shared memory ends with it
    os.chdir(job)
    home, path = str(job), job / "path"  # the package, and nothing beside it
    path.mkdir()
    (path / "minizero").symlink_to(PACKAGE)
    sys.path[:] = [str(path)] + [
        p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "tests")
    ]
    os.environ.clear()
    os.environ.update(
        HOME=home, TMPDIR=home, PATH=os.defpath, PYTHONPATH=str(path),
        LC_ALL="C.UTF-8", **FIXED,
    )  # fmt: skip
    tempfile.tempdir = None
    output = os.open(OUTPUT, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, output), (2, output)):
        os.dup2(target, number)
    os.closerange(3, 256)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write raises OSError
    user = os.getuid() or 60_000 + os.getppid() % 5_000
    threads = 0
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it may end at this moment
            threads += each.num_threads() * (each.uids().real == user)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, 4 * limits.memory),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_NPROC, threads + 20 * limits.processes),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
    forbid(read=[*readable(), job], write=[job, Path(os.devnull)])
    if user != os.getuid():
        become_another(user, job)
    prctl(1, signal.SIGKILL)  # it ends with the process that supervises it


def become_another(user: int, job: Path) -> None:
    """For a grader who is root, whom no limit of processes binds: be another user.

    This user may read what root may, where `forbid` permits it, since Python itself may
    be in root's home.
    """
    for each in (job, *job.iterdir()):
        os.chown(each, user, user, follow_symlinks=False)
    job.parent.chmod(0o711)
    reading = 2  # CAP_DAC_READ_SEARCH
    prctl(8, 1)  # capabilities survive a change of user
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)(*[1 << reading] * 3, 0, 0, 0)
    if ctypes.CDLL(None).capset(header, sets) == 0:
        prctl(47, 2, reading)  # and what it starts may, too


def work(job: Path) -> None:
    """Run the answer's cases, and write what is observed of each as a line."""
    run, name, cases = cloudpickle.loads((job / TASK).read_bytes())
    (job / TASK).unlink()
    before = measures()
    try:
        answer = define((job / ANSWER).read_text(), name)
    except BaseException as error:
        seen = {RAISES: f"{type(error).__name__}: {error}"[:2000]}
        (job / RESULT).write_text((json.dumps(seen) + "\n") * len(cases))
        return
    for case in cases:
        seen = observe(run, answer, case)
        if changed := [n for n, v in measures().items() if before.get(n, v) is not v]:
            seen = {ENDED: f"it replaces {changed[0]}, with which answers are measured"}
        with (job / RESULT).open("a") as file:
            file.write(json.dumps(seen) + "\n")


def measures() -> dict[str, Any]:
    """Functions and classes that answers are measured with, by their names."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name in ("builtins", "json", "torch") or name.startswith("minizero"):
            for key, value in vars(module).items():
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__.startswith("minizero"):
                    found |= {f"{name}.{key}.{k}": v for k, v in vars(value).items()}
    return {n: v for n, v in found.items() if callable(v) or isinstance(v, property)}


def readable() -> list[Path]:
    """What Python, torch and this package are made of, and nothing else of the book."""
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev", "/opt")
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    packages = [p for p in sys.path if p.endswith(("-packages", ".zip"))]

    def beside(folder: Path) -> list[Path]:
        if folder not in ROOT.parents:
            return [folder]
        return [p for each in folder.iterdir() if each != ROOT for p in beside(each)]

    every = map(beside, map(Path, (*system, *python, *packages)))
    return [PACKAGE, *(path for some in every for path in some)]


def prctl(option: int, value: int, more: int = 0) -> None:
    """A switch of Linux; elsewhere nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, more, 0, 0)


def landlock() -> int:
    """The version of Landlock that this system has; 0 for none."""
    linux = sys.platform.startswith("linux")
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, 1)) if linux else 0


def forbid(read: list[Path], write: list[Path]) -> None:
    """Forbid files elsewhere and signals outward, by Landlock.

    So an answer finds no reference on the disk, and leaves no file outside its folder.
    """
    version = landlock()
    if not version:
        return
    call = ctypes.CDLL(None).syscall
    create, add, restrict = 444, 445, 446
    reading = 0b1101  # execute, read a file, list a folder
    every = (1 << min(13 + (version > 1) + (version > 2) + (version > 4), 16)) - 1
    rights = every & ~(1 << 15)  # not ioctl on devices, which terminals need

    class Ruleset(ctypes.Structure):
        _fields_ = [(n, ctypes.c_uint64) for n in ("files", "network", "scopes")]

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]

    scopes = 0b10 if version > 5 else 0  # signals stay inside
    size = 24 if version > 5 else 8
    rules = call(create, ctypes.byref(Ruleset(rights, 0, scopes)), size, 0)
    for paths, allowed in ((read, reading), (write, rights)):
        for path in paths:
            if path.exists():
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                only = allowed if path.is_dir() else allowed & 0b111
                call(add, rules, 1, ctypes.byref(Beneath(only, folder)), 0)
                os.close(folder)
    prctl(38, 1)  # gain no rights
    call(restrict, rules, 0)


if __name__ == "__main__":
    main()
