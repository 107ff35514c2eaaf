"""Ranks are forked from a server, and are as if they had been started from nothing."""

import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import cloudpickle
import torch

from minizero.ranks import launch, rank

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
        return now, os.listdir(), sys.argv[0], sys.path[0]

    monkeypatch.setenv("MINIZERO_OLD", "1")
    assert launch(look, 1, timeout=60)[0][0] == [None, "1"]
    monkeypatch.delenv("MINIZERO_OLD")
    monkeypatch.setenv("MINIZERO_NEW", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = launch(look, 1, timeout=60)[0]
    assert found == (["1", None], ["here"], "program", str(tmp_path))


def test_the_server_has_no_thread_and_no_gpu():
    tasks = Path(f"/proc/{server()}/task")
    assert len(list(tasks.iterdir())) == 1
    maps = Path(f"/proc/{server()}/maps").read_text()
    assert "libtorch" in maps and "/dev/nvidia" not in maps

    def fresh():
        import gc

        imported = "minizero.zero" in sys.modules
        return imported, torch.cuda.is_initialized(), gc.get_freeze_count() > 10_000

    assert launch(fresh, 1, timeout=60) == [(True, False, True)]


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
    """Before and after."""
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
