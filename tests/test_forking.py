"""Ranks are forked from a server, and are as if they had been started from nothing."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch

from minizero.ranks.launch import Pool, RankError, launch, rank
from minizero.ranks.processes import starting, worker
from minizero.ranks.processes.pool import Processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook


def server():
    """The process id of the server in use."""
    return launch(os.getppid, 1, timeout=60)[0]


def test_random_numbers_differ():
    def draw():
        import numpy

        return random.random(), numpy.random.rand()

    drawn = [pair for _ in range(2) for pair in launch(draw, 2, timeout=60)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


def test_ranks_are_of_this_moment(monkeypatch, tmp_path):
    def look():
        now = [os.environ.get(name) for name in ("MINIZERO_NEW", "MINIZERO_OLD")]
        cores, files = os.sched_getaffinity(0), os.listdir()
        return now, cores, files, sys.argv[0], sys.path[0]

    monkeypatch.setenv("MINIZERO_OLD", "1")
    assert launch(look, 1, timeout=60)[0][0] == [None, "1"]
    monkeypatch.delenv("MINIZERO_OLD")
    monkeypatch.setenv("MINIZERO_NEW", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.syspath_prepend(str(tmp_path))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        found = launch(look, 1, timeout=60)[0]
    finally:
        os.sched_setaffinity(0, cores)
    one = {min(cores)}
    assert found == (["1", None], one, ["here"], "program", str(tmp_path))


def test_a_server_serves_as_long_as_it_can(monkeypatch):
    """What libraries read as they are loaded cannot be told to it later."""

    def at_load():
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
        return b"OMP_PLACES=cores" in first, os.getppid()

    first = server()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert launch(at_load, 1, timeout=60) == [(False, first)]
    with Pool(1, timeout=60) as pool:
        monkeypatch.setenv("OMP_PLACES", "cores")
        assert launch(at_load, 2, timeout=60) == [(True, os.getpid())] * 2
        assert pool.run(os.getppid) == [first]
    monkeypatch.delenv("OMP_PLACES")
    assert server() == first


def test_the_server_has_no_thread_and_no_gpu():
    tasks = Path(f"/proc/{server()}/task")
    assert len(list(tasks.iterdir())) == 1
    maps = Path(f"/proc/{server()}/maps").read_text()
    assert "libtorch" in maps and "/dev/nvidia" not in maps

    def fresh():
        started = vars(sys.modules["minizero.ranks.processes.worker"])["__file__"]
        import gc

        return started, torch.cuda.is_initialized(), gc.get_freeze_count() > 10_000

    assert launch(fresh, 1, timeout=60) == [(worker.__file__, False, True)]


# The server is killed


def test_the_server_is_killed_between_pools():
    first = server()
    os.kill(first, signal.SIGKILL)
    assert launch(rank, 2, timeout=60) == [0, 1]
    assert server() != first
    assert not psutil.pid_exists(first)


def test_the_server_is_killed_at_a_start(monkeypatch):
    """Before it has told the first rank's process id."""
    first, get, threads = server(), multiprocessing.get_context, []

    def stop_and_get(method):
        if not threads:
            os.kill(first, signal.SIGSTOP)
            threads.append(threading.Timer(1, os.kill, (first, signal.SIGKILL)))
            threads[0].start()
        return get(method)

    monkeypatch.setattr(starting.multiprocessing, "get_context", stop_and_get)
    assert launch(rank, 2, timeout=60) == [0, 1]
    monkeypatch.undo()
    assert server() != first


def test_the_server_is_killed_while_ranks_run():
    pool = Pool(2, timeout=60)
    pids = pool.run(os.getpid)
    os.kill(pool.run(os.getppid)[0], signal.SIGKILL)
    while pool.alive:
        time.sleep(0.01)
    message = r"^ranks 0, 1 lost: the process that ranks are forked from has ended\."
    with pytest.raises(RankError, match=message):
        pool.run(rank)
    assert not pool.alive
    psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 20)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_may_leave_with_the_code_of_the_lost():
    with pytest.raises(RankError, match="^rank 0 left with exit code 255 before"):
        launch(os._exit, 1, 255, timeout=60)


def test_no_process_can_be_had(monkeypatch):
    def refuse(self):
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    message = r"^rank 0 cannot be started: .*Resource temporarily unavailable\.$"
    with pytest.raises(RankError, match=message) as caught:
        Processes(2, 60)
    assert caught.value.rank == 0


def test_a_rank_that_cannot_start_says_why(tmp_path):
    """As when a module of this package has been broken meanwhile."""
    (tmp_path / "minizero.py").write_text("raise ImportError('no such luck')")
    program = f"""
    import sys
    from minizero.ranks.launch import Pool
    sys.path.insert(0, {str(tmp_path)!r})
    Pool(1, timeout=60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
    )
    assert "RankError: rank 0 left with exit code 1 before it had" in done.stderr
    assert "\nImportError: no such luck\n" in done.stderr


# Programs that have processes of their own


def test_a_fork_of_this_process_may_have_ranks_too():
    with Pool(1, timeout=60) as pool:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if launch(rank, 2, timeout=60) == [0, 1] else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert pool.run(rank) == [0]
        assert pool.run(os.getppid) == [server()]


def test_threads_may_start_ranks_at_once():
    main, found = sys.modules["__main__"], []
    threads = [
        threading.Thread(target=lambda: found.append(launch(rank, 1, timeout=60)))
        for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [[0]] * 3
    assert sys.modules["__main__"] is main


def test_a_rank_has_processes_of_its_own():
    def work():
        chosen = multiprocessing.get_start_method(allow_none=True)
        data = torch.arange(4.0)
        methods = "fork", "forkserver"
        sums = []
        for method in methods:
            loader = torch.utils.data.DataLoader(
                data, num_workers=1, multiprocessing_context=method
            )
            sums.append(sum(x.item() for x in loader))
        return sums, chosen, launch(rank, 2, timeout=60)

    ours = multiprocessing.get_start_method(allow_none=True)
    assert launch(work, 1, timeout=120) == [([6.0, 6.0], ours, [0, 1])]


def test_a_program_may_use_multiprocessing_as_well(tmp_path):
    """Before and after; and in a folder with modules that are not meant."""
    for name in ("torch", "cloudpickle", "worker"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    program = """
    import multiprocessing, signal

    def say(queue):
        queue.put(signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())

    def use(method):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=say, args=(queue,))
        process.start()
        process.join()
        return process.exitcode, queue.get()

    if __name__ == "__main__":
        from minizero.ranks.launch import launch, rank
        multiprocessing.set_forkserver_preload(["json"])
        print(launch(rank, 2, timeout=60))
        multiprocessing.set_start_method("spawn")  # an error if one is chosen
        print(use("forkserver"), use("spawn"))
        print(launch(rank, 1, timeout=60))
    """
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        cwd=tmp_path,
    )
    lines = ["[0, 1]", "(0, True) (0, True)", "[0]"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")
