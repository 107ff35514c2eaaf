"""What `minizero.launch` promises when nothing goes wrong, and for bad arguments."""

import gc
import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import minizero
from minizero.ranks import (
    Pool,
    RankError,
    default_ranks,
    device,
    init_distributed,
    launch,
    rank,
    report,
    world_size,
)
from minizero.ranks.rendezvous import join

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook

SCALE = 10


class Result:
    def __init__(self, value):
        self.value = value


def total(value, add=0):
    tensor = torch.tensor([float(rank() * SCALE + value)])
    dist.all_reduce(tensor)
    return Result(tensor.item() + add)


@pytest.fixture(scope="module")
def pool():
    with Pool(3, timeout=60) as ranks:
        yield ranks


def run_script(tmp_path, text, *command, **environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [*(command or [sys.executable]), str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        cwd=os.getcwd(),
    )


def test_a_group_for_nccl_moves_host_memory_too(monkeypatch):
    made = []
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *args, **options: made.append((args, options)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    join("nccl", 60, os.devnull)
    join("gloo", 60, os.devnull)
    assert [args for args, _ in made] == [("cpu:gloo,cuda:nccl",), ("gloo",)]
    assert made[0][1]["device_id"] == torch.device("cuda", 1)
    assert made[1][1]["device_id"] is None


@pytest.mark.parametrize("nprocs", [1, 2, 5])
def test_results_come_back_by_rank(nprocs):
    results = launch(total, nprocs, 1, add=2, timeout=60)
    expected = SCALE * sum(range(nprocs)) + nprocs + 2
    assert [result.value for result in results] == [expected] * nprocs
    assert all(type(result) is Result for result in results)
    assert minizero.launch is launch


def test_ranks_know_who_they_are(pool):
    facts = pool.run(
        lambda: (rank(), world_size(), device().type, torch.get_num_threads())
    )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0))
    assert facts == [(r, 3, kind, max(1, cores // 3)) for r in range(3)]
    assert (rank(), world_size()) == (0, 1)


def test_joining_again_does_nothing(pool):
    assert pool.run(init_distributed) == [None] * 3
    assert [result.value for result in pool.run(total, 0)] == [30.0] * 3


def test_ranks_end_with_launch():
    launch(os.getpid, 1, timeout=60)  # the fork server, and its tracker, stay
    before = len(os.listdir("/proc/self/fd"))
    pids = launch(os.getpid, 2, timeout=60)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# Output


def test_every_line_gets_a_prefix(two, capsys):
    """A progress bar's too, and characters may arrive in halves."""
    for pieces, lines in (
        (["a\nb\n\nc"], "[{0}] a\n[{0}] b\n[{0}] \n[{0}] c\n"),
        (["1%\r2%", "\r3%\n"], "[{0}] 1%\r[{0}] 2%\r[{0}] 3%\n"),
        (["a\r\nb\r\n"], "[{0}] a\r\n[{0}] b\r\n"),
        (["é".encode()[:1], "é".encode()[1:]], "[{0}] é\n"),
        ([b"\xff\n"], "[{0}] \ufffd\n"),
    ):
        data = [x if isinstance(x, bytes) else x.encode() for x in pieces]
        two.run(lambda data: [os.write(1, x) for x in data] and None, data)
        both = "".join(lines.format(f"rank {r}") for r in (0, 1))
        assert capsys.readouterr().out == both


def test_output_comes_in_rank_order(pool, tmp_path, capsys):
    def talk():
        while rank() < 2 and not (tmp_path / f"{rank() + 1}").exists():
            time.sleep(0.01)  # the last rank is the first to print
        print("out", rank())
        print("error", rank(), file=sys.stderr)
        os.write(1, b"from below\n")
        print("open end", end="", flush=True)
        (tmp_path / f"{rank()}").touch()

    pool.run(talk)
    lines = ["out {0}", "error {0}", "from below", "open end"]
    expected = [f"[rank {r}] " + line.format(r) for r in range(3) for line in lines]
    assert capsys.readouterr().out.splitlines() == expected


def test_rank_0_is_shown_live_and_others_wait(pool, tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    class Screen(io.StringIO):
        def write(self, text):
            if "first" in text:
                seen.touch()
            return super().write(text)

    def talk():
        print("first" if rank() == 0 else "later")
        while not seen.exists():  # as long as the parent has not shown it
            time.sleep(0.01)
        print("last")

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    pool.run(talk)
    lines = [f"[rank {r}] {text}" for r in (1, 2) for text in ("later", "last")]
    assert screen.getvalue().splitlines() == ["[rank 0] first", "[rank 0] last", *lines]


def test_much_output_does_not_block(pool, capsys):
    pool.run(lambda: print("x" * 1_000_000))
    assert capsys.readouterr().out == "".join(
        f"[rank {r}] {'x' * 1_000_000}\n" for r in range(3)
    )


# A live pool


def test_names_last(pool, capsys):
    pool.execute("from minizero.ranks.launch import rank\nx = 10 + rank()")
    assert pool.execute("y = x\nx + y") == ["20", "22", "24"]
    assert capsys.readouterr().out == "[rank 0] 20\n[rank 1] 22\n[rank 2] 24\n"
    assert pool.pull("x") == [10, 11, 12]
    assert pool.execute("x;") == pool.execute("None") == pool.execute("") == [None] * 3
    assert pool.execute("_") == ["20", "22", "24"]


def test_classes_of_a_cell_come_back(pool):
    pool.execute("class Point:\n    x = 3\npoint = Point()")
    assert [point.x for point in pool.pull("point")] == [3, 3, 3]


def test_some_ranks(pool):
    assert pool.run(rank, ranks=[2, 0]) == [2, 0]
    pool.execute("chosen = 1", ranks=[1])
    with pytest.raises(RankError, match="ranks 0, 2 raised NameError"):
        pool.pull("chosen")


@pytest.mark.parametrize("ranks", [[], [3], [-1], [0, 0]])
def test_ranks_that_are_not_there(pool, ranks):
    with pytest.raises(ValueError, match=r"ranks is .*; name one or more of 0 to 2"):
        pool.run(rank, ranks=ranks)


def test_an_error_keeps_the_pool(pool, capsys):
    pool.execute("kept = 1")
    source = "import os\nif int(os.environ['RANK']) == 1:\n    1 / 0"
    with pytest.raises(RankError) as caught:
        pool.execute(source)
    assert caught.value.rank == 1
    first, _, *traceback = str(caught.value).splitlines()
    assert first == "rank 1 raised ZeroDivisionError: division by zero"
    assert traceback[0] == "Traceback (most recent call last):"
    assert ", line 3, in <module>" in traceback[1]
    assert traceback[2].strip() == "1 / 0"
    assert "minizero/ranks" not in str(caught.value)
    assert pool.pull("kept") == [1, 1, 1]


def test_a_rank_that_fails_does_not_wait_for_a_busy_one(pool):
    def work():
        if rank() == 0:
            raise ValueError("no more")
        time.sleep(1000)

    pool.execute("kept = 2")
    with pytest.raises(RankError, match="rank 0 raised ValueError: no more"):
        pool.run(work)
    assert pool.pull("kept") == [2, 2, 2]


def test_a_closed_pool():
    pool = Pool(1, timeout=60)
    pool.close()
    pool.close()
    assert not pool.alive
    with pytest.raises(RuntimeError, match="these ranks have ended"):
        pool.run(rank)


def test_a_forgotten_pool_ends():
    pool = Pool(1, timeout=60)
    (pid,) = pool.run(os.getpid)
    del pool
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


def test_what_ranks_do_at_exit_is_done(tmp_path, capsys):
    with Pool(2, timeout=60) as pool:
        pool.execute(f"file = open({str(tmp_path / 'log')!r}, 'a')\nfile.write('x')")
        pool.execute("import atexit\natexit.register(print, 'bye')\nNone")
    # on their way out nobody orders them
    last = capsys.readouterr().out.splitlines()[-2:]
    assert sorted(last) == ["[rank 0] bye", "[rank 1] bye"]
    assert (tmp_path / "log").read_text() == "xx"


# Arguments that make no sense


@pytest.mark.parametrize("nprocs", [0, -1, True, 2.0, "2", None])
def test_number_of_ranks(nprocs):
    with pytest.raises(ValueError, match=r"nprocs is .*; give a number of ranks"):
        launch(rank, nprocs)


def test_other_arguments():
    with pytest.raises(ValueError, match="timeout is -1; give a positive number"):
        launch(rank, 1, timeout=-1)
    with pytest.raises(ValueError, match="backend is 'smoke'; choose"):
        launch(rank, 1, backend="smoke")
    with pytest.raises(TypeError, match="ranks run a function, and 3 is not one"):
        launch(3, 1)
    if torch.cuda.device_count() < 9:
        with pytest.raises(ValueError, match="'nccl' needs a GPU for each rank"):
            launch(rank, 9, backend="nccl")


def test_what_cannot_be_pickled(pool):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="<lambda> and its arguments cannot be sent"):
        launch(lambda: lock, 1)
    with pytest.raises(RankError, match="the result, a lock, cannot be pickled"):
        pool.run(threading.Lock)


def test_a_result_that_does_not_arrive(pool):
    class Odd:
        def __reduce__(self):
            return int, ("odd",)

    with pytest.raises(RankError, match="result of rank 0 cannot be unpickled"):
        pool.run(Odd)


def test_default_ranks(monkeypatch):
    monkeypatch.delenv("MINIZERO_RANKS", raising=False)
    assert default_ranks() == (torch.cuda.device_count() or 4)
    monkeypatch.setenv("MINIZERO_RANKS", "3")
    assert default_ranks() == 3
    for wrong in ("0", "-1", "two", "", "1.5"):
        monkeypatch.setenv("MINIZERO_RANKS", wrong)
        with pytest.raises(ValueError, match="MINIZERO_RANKS is .*; set it to"):
            default_ranks()


def test_nobody_reads_reports_here():
    assert report("waits", 1, "all_reduce of 1 float32", 1, [0]) is None


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_ranks_take_no_core_from_one_another(pool):
    assert pool.run(os.sched_getscheduler, 0) == [os.SCHED_BATCH] * 3


# Scripts


def test_a_script_needs_no_guard(tmp_path):
    done = run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from minizero.ranks import launch

        print("once")

        @dataclass
        class Answer:
            value: int

        base = 40

        def work(more):
            print("working")
            return Answer(base + more)

        results = launch(work, 2, 2)
        assert all(type(result) is Answer for result in results)
        print([result.value for result in results])
        """,
    )
    lines = ["once", "[rank 0] working", "[rank 1] working", "[42, 42]"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")


PROGRAM = """
    import os, torch, torch.distributed as dist
    from minizero.ranks.launch import init_distributed, rank, world_size
    init_distributed()
    init_distributed()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    line = f"{rank()} {world_size()} {ones.item()}\\n"
    os.write(1, line.encode())  # at once, so that no other rank's comes in between
    """


def test_a_process_alone(tmp_path):
    done = run_script(tmp_path, PROGRAM)
    assert (done.stdout, done.stderr) == ("0 1 1.0\n", "")


def test_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run_script(tmp_path, PROGRAM, *torchrun, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 2.0", "1 2 2.0"]


@pytest.mark.thorough
def test_two_nodes(network, tmp_path):
    """By the command that works everywhere, in namespaces with a wire between them."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    inside = ["env", "-u", "GLOO_SOCKET_IFNAME", f"PYTHONPATH={os.getcwd()}"]
    options = "--nnodes=2 --nproc-per-node=2 --master-addr=10.213.9.1"
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *inside, sys.executable]
            + ["-m", "torch.distributed.run", *options.split()]
            + ["--master-port=29507", f"--node-rank={i}", str(script)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(network)
    ]
    lines = [node.communicate(timeout=120)[0].splitlines() for node in nodes]
    assert [sorted(each) for each in lines] == [
        ["0 4 4.0", "1 4 4.0"],
        ["2 4 4.0", "3 4 4.0"],
    ]


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_rank_starts_later_than_a_collective_may_take(tmp_path, late):
    program = f"""
    import os, time
    time.sleep(4 * (os.environ["RANK"] == "{late}"))
    """
    program += PROGRAM.replace("init_distributed()", "init_distributed(timeout=2)", 1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run_script(tmp_path, program, *torchrun, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 2.0", "1 2 2.0"]


def test_a_rank_never_starts(tmp_path):
    program = """
    import os, time
    from minizero.ranks import init_distributed, rendezvous
    rendezvous.START = 2.0
    if os.environ["RANK"] == "{}":
        time.sleep(1000)
    init_distributed()
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for missing in (0, 1):
        script = program.format(missing)
        done = run_script(tmp_path, script, *torchrun, "--nproc-per-node=2")
        assert done.returncode == 1
        assert "not all of the 2 ranks have started in 2 s" in done.stderr


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages() -> int:
    """KiB of huge pages that this process has, beside a large tensor."""
    large = torch.ones(1 << 25)
    memory = Path("/proc/self/smaps_rollup").read_text()
    [found] = re.findall(r"AnonHugePages: +([0-9]+) kB", memory)
    return int(found) if large.all() else 0


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="no huge pages here"
)
def test_a_large_tensor_has_huge_pages() -> None:
    """Torch reads whether it should ask for them with the first tensor it makes."""
    assert launch(huge_pages, 1)[0] > 1 << 14
