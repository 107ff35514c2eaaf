"""What `launch` and `Pool` promise when nothing goes wrong, and for bad arguments."""

import gc
import io
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import TORCHRUN, run_script

import minizero
from minizero.lab.cells import execute, lookup
from minizero.ranks import (
    Pool,
    RankError,
    default_ranks,
    device,
    init_distributed,
    launch,
    rank,
    rendezvous,
    world_size,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook

SCALE = 10


class Result:
    def __init__(self, value):
        self.value = value


def total(value, add=0):
    tensor = torch.tensor([float(rank() * SCALE + value)])
    dist.all_reduce(tensor)
    return Result(tensor.item() + add)


@pytest.fixture(scope="module", autouse=True)
def patient():
    """However slow a machine is, ranks come back and leave before they are ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minizero.ranks.pool.PATIENCE", 1000)
        patch.setattr("minizero.ranks.pool.LEAVE", 1000)
        yield


@pytest.fixture(scope="module")
def pool(patient):
    with Pool(3) as ranks:
        yield ranks


def test_ranks_know_who_they_are_and_end_with_launch():
    """Their results come back by rank, of classes that only the caller has."""
    launch(os.getpid, 1)  # the fork server, and its tracker, stay
    before = len(os.listdir("/proc/self/fd"))

    def work(value):
        us = rank(), world_size(), os.getpid(), torch.get_num_threads()
        init_distributed()  # nothing to do
        return total(value, add=2), *us, device().type

    assert minizero.launch is launch
    share = max(1, torch.get_num_threads() // 2)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    for r, (result, *facts, on) in enumerate(found := launch(work, 2, 1)):
        assert type(result) is Result and result.value == SCALE + 2 + 2
        threads = int(os.environ.get("OMP_NUM_THREADS", share))
        assert facts == [r, 2, facts[2], threads] and on == kind
    assert (rank(), world_size()) == (0, 1)
    assert not [each for each in found if os.path.exists(f"/proc/{each[3]}")]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_is_as_if_started_from_nothing(pool, monkeypatch, tmp_path):
    """Of this moment, with random numbers of its own, though forked from a server."""
    monkeypatch.setenv("MINIZERO_NEW", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        now = os.environ.get("MINIZERO_NEW"), os.getcwd(), sys.argv[0], sys.path[0]
        fresh = torch.cuda.is_initialized(), gc.get_freeze_count() > 10_000
        return now, fresh, os.getppid(), random.random(), numpy.random.rand()

    found = launch(look, 2)
    assert len({number for *_, a, b in found for number in (a, b)}) == 4
    for now, fresh, server, *_ in found:
        assert now == ("1", str(tmp_path), "program", str(tmp_path))
        assert fresh == (torch.cuda.is_available(), True)
        assert len(os.listdir(f"/proc/{server}/task")) == 1  # it may fork
        assert "/dev/nvidia" not in Path(f"/proc/{server}/maps").read_text()


@pytest.mark.thorough
def test_a_rank_has_processes_of_its_own():
    def work():
        ranks = launch(rank, 2)  # first: its fork server has torch for the loaders
        data, sums = torch.arange(4.0), []
        for method in "fork", "forkserver":
            loader = torch.utils.data.DataLoader(
                data, num_workers=1, multiprocessing_context=method
            )
            sums.append(sum(x.item() for x in loader))
        return sums, ranks

    assert launch(work, 1) == [([6.0, 6.0], [0, 1])]


# Output


def test_every_line_gets_a_prefix(pool, capsys):
    """A progress bar's too, and characters may arrive in halves."""
    for pieces, lines in (
        (["a\nb\n\nc"], "[{0}] a\n[{0}] b\n[{0}] \n[{0}] c\n"),
        (["1%\r2%", "\r3%\n"], "[{0}] 1%\r[{0}] 2%\r[{0}] 3%\n"),
        (["a\r", "\nb\r\n"], "[{0}] a\r\n[{0}] b\r\n"),
        (["é".encode()[:1], "é".encode()[1:]], "[{0}] é\n"),
        ([b"\xff\n"], "[{0}] \ufffd\n"),
        (["x" * 1_000_000], f"[{{0}}] {'x' * 1_000_000}\n"),
    ):
        data = [x if isinstance(x, bytes) else x.encode() for x in pieces]
        pool.run(lambda data: [os.write(1, x) for x in data] and None, data)
        every = "".join(lines.format(f"rank {r}") for r in range(3))
        assert capsys.readouterr().out == every


def test_rank_0_is_shown_live_and_others_in_order(pool, tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    class Screen(io.StringIO):
        def write(self, text):
            if "first" in text:
                seen.touch()
            return super().write(text)

    def talk():
        if rank():  # the last rank is the first to print
            while rank() < 2 and not (tmp_path / f"{rank() + 1}").exists():
                time.sleep(0.01)
            print("out")
            (tmp_path / f"{rank()}").touch()
        else:
            print("first")
        while not seen.exists():  # as long as the parent has not shown it
            time.sleep(0.01)
        print("error", file=sys.stderr)
        os.write(1, b"from below\n")
        print("open end", end="", flush=True)

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    pool.run(talk)
    rest = ["error", "from below", "open end"]
    lines = [f"[rank {r}] {text}" for r in (1, 2) for text in ("out", *rest)]
    lines = ["[rank 0] first", *(f"[rank 0] {text}" for text in rest), *lines]
    assert screen.getvalue().splitlines() == lines


# A live pool


def cell(pool, source):
    return pool.run(execute, source, "<cell>")


def test_names_last(pool, capsys):
    cell(pool, "from minizero.ranks import rank\nx = 10 + rank()")
    assert cell(pool, "y = x\nx + y") == ["20", "22", "24"]
    assert capsys.readouterr().out == "[rank 0] 20\n[rank 1] 22\n[rank 2] 24\n"
    assert pool.run(lookup, "x") == [10, 11, 12]
    for source in "x;", "None", "":
        assert cell(pool, source) == [None] * 3
    assert cell(pool, "_") == ["20", "22", "24"]
    cell(pool, "class Point:\n    x = 3\npoint = Point()")
    assert [point.x for point in pool.run(lookup, "point")] == [3, 3, 3]


def all_raise():
    raise KeyError("missing")


def one_raises():
    if rank() == 1:
        raise ValueError("no more\nby two")


def leaves():
    if rank() == 2:
        sys.exit(3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (one_raises, ["rank 1 raised ValueError: no more\n\nTraceback", "\nby two"]),
        (all_raise, ["ranks 0, 1, 2 raised KeyError: 'missing'"]),
        (leaves, ["rank 2 raised SystemExit: 3"]),
        (
            threading.Lock,
            ["ranks 0, 1, 2 raised TypeError: cannot pickle '_thread.lock'"],
        ),
    ],
)
def test_an_error_keeps_the_pool(pool, fault, words):
    cell(pool, "kept = 2")
    with pytest.raises(RankError) as caught:
        pool.run(fault)
    assert all(each in str(caught.value) for each in words)
    assert pool.run(lookup, "kept") == [2, 2, 2]


def test_a_traceback_shows_the_lines_of_the_program(pool):
    source = "import os\nif int(os.environ['RANK']) == 1:\n    1 / 0"
    with pytest.raises(RankError) as caught:
        cell(pool, source)
    assert caught.value.rank == 1
    first, _, *traceback = str(caught.value).splitlines()
    assert first == "rank 1 raised ZeroDivisionError: division by zero"
    assert traceback[0] == "Traceback (most recent call last):"
    assert ", line 3, in <module>" in traceback[1]
    assert traceback[2].strip() == "1 / 0"
    assert "minizero" not in str(caught.value)


def test_a_pool_ends(tmp_path, capsys):
    """Closed, forgotten; what ranks do at exit is done."""
    pool = Pool(2)
    cell(pool, f"file = open({str(tmp_path / 'log')!r}, 'a')\nfile.write('x')")
    cell(pool, "import atexit\natexit.register(print, 'bye')\nNone")
    pool.close()
    pool.close()
    assert not pool.alive and (tmp_path / "log").read_text() == "xx"
    assert capsys.readouterr().out.splitlines()[-2:] == ["[rank 0] bye", "[rank 1] bye"]
    with pytest.raises(RuntimeError, match="these ranks have ended"):
        pool.run(rank)
    launch(dist.destroy_process_group, 2)  # as many programs end
    assert capsys.readouterr().out == ""
    pool = Pool(1)
    (pid,) = pool.run(os.getpid)
    del pool
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


LOCK = threading.Lock()
MISUSE = {
    "nprocs is .*; give a number of ranks": [
        lambda n=n: launch(rank, n) for n in (0, -1, True, 2.0, "2", None)
    ],
    "'nccl' needs a GPU for each rank": [lambda: launch(rank, 999, backend="nccl")],
    "cannot pickle '_thread.lock' object": [lambda: launch(lambda lock: lock, 1, LOCK)],
}


@pytest.mark.parametrize("message", MISUSE)
def test_arguments_that_make_no_sense(message):
    for wrong in MISUSE[message]:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


def test_default_ranks(monkeypatch):
    monkeypatch.delenv("MINIZERO_RANKS", raising=False)
    assert default_ranks() == (torch.cuda.device_count() or 4)
    monkeypatch.setenv("MINIZERO_RANKS", "3")
    assert default_ranks() == 3


# How ranks meet


def test_a_group_for_nccl_moves_host_memory_too(monkeypatch):
    made = []
    patches = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda device: None,
    }
    for name, stub in patches.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *a, **options: made.append((a, options))
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(os, "sched_setscheduler", lambda *policy: None)
    for backend in ("nccl", "gloo"):
        rendezvous.join(backend, timedelta(seconds=60))
    assert [args for args, _ in made] == [("cpu:gloo,cuda:nccl",), ("gloo",)]
    assert made[0][1]["device_id"] == torch.device("cuda", 1)
    assert made[1][1]["device_id"] is None


PROGRAM = """
    import os, torch, torch.distributed as dist
    from minizero.ranks import init_distributed, rank, world_size
    init_distributed()
    init_distributed()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    line = f"{rank()} {world_size()} {ones.item()}\\n"
    os.write(1, line.encode())  # at once, so that no other rank's comes in between
    """


@pytest.mark.thorough  # the README's commands start ranks from scripts too
def test_a_script_needs_no_guard_and_may_be_alone(tmp_path):
    """It may also leave a pool open."""
    alone = """
    from minizero.ranks import Pool, launch

    base = 40

    def work(more):
        print("working")
        return base + more

    print(launch(work, 2, 2))
    pool = Pool(2)
    print(pool.run(rank))
    """
    done = run_script(tmp_path, PROGRAM + alone)
    lines = ["0 1 1.0", "[rank 0] working", "[rank 1] working", "[42, 42]", "[0, 1]"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")


@pytest.mark.thorough  # the README's example runs under it too
def test_torchrun(tmp_path):
    done = run_script(tmp_path, PROGRAM, *TORCHRUN, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 2.0", "1 2 2.0"]


@pytest.mark.thorough
def test_torchrun_starts_ranks_again(tmp_path):
    """A quick rank does not read the address of a dead one."""
    dies = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1:
        os._exit(3)
    dist.barrier()
    os.write(1, b"again\\n")
    """
    options = ["--master-addr=127.0.0.1", "--master-port=29508", "--max-restarts=1"]
    torchrun = [*TORCHRUN[:3], *options, "--nproc-per-node=2"]
    done = run_script(tmp_path, PROGRAM + dies, *torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("again") == 2


@pytest.mark.thorough
def test_two_nodes(network, tmp_path):
    """By the command that works everywhere, in namespaces with a wire between them."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    inside = ["env", "-u", "GLOO_SOCKET_IFNAME", f"PYTHONPATH={os.getcwd()}"]
    options = "--nnodes=2 --nproc-per-node=2 --master-addr=10.213.9.1"
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *inside, *TORCHRUN[:3], *options.split()]
            + ["--master-port=29507", f"--node-rank={i}", str(script)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(network)
    ]
    lines = [node.communicate(timeout=300)[0].splitlines() for node in nodes]
    assert [sorted(each) for each in lines] == [
        ["0 4 4.0", "1 4 4.0"],
        ["2 4 4.0", "3 4 4.0"],
    ]
