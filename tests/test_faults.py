"""Whatever goes wrong on a rank ends in one clear error, and leaves nothing."""

import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from multiprocessing.connection import Connection

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from minizero import comm
from minizero.ranks import Pool, RankError, launch, pool, rank, report
from minizero.ranks.reports import ALONE, DIFFERENT, Post, Report, verdict

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook

SLACK = 60.0  # for a machine that is slow to start and to end processes


def meet():
    comm.all_reduce(torch.ones(8))


def raises(folder):
    subprocess.Popen(["sleep", "1000"])  # which ends with the rank
    print("begun")
    (folder / f"{rank()} has begun").touch()
    while not (folder / "0 has begun").exists():
        time.sleep(0.01)
    if rank() == 1:
        print("ending", end="", flush=True)
        raise ValueError("too short\nby two")
    meet()


def leaves_at_once(folder):
    """After rank 0 has told of the lost peer, which is only an echo."""
    if rank() == 0:
        (folder / "told").touch()
        raise RuntimeError("Connection closed by peer [127.0.0.1]")
    while not (folder / "told").exists():
        time.sleep(0.01)
    time.sleep(pool.PATIENCE + 0.5)  # the cause may be late
    os._exit(7)


def hangs(folder):
    meet()
    if rank() == 1:
        time.sleep(1000)
    with comm.phase("backward", "block.1"):
        meet()


def calls_another(folder):
    meet()
    if rank() == 0:
        comm.gather_objects("what rank 0 saves alone")
    else:
        meet()


def calls_fewer(folder):
    meet()
    if rank() == 0:
        meet()


FAULTS = {
    raises: (
        1,
        [
            r"^rank 1 raised ValueError: too short\n\nTraceback",
            r"\nby two\n\nAll ranks were ended\.$",
        ],
    ),
    leaves_at_once: (
        1,
        [r"^rank 1 left with exit code 7 before it had finished\.\n\nAll"],
    ),
    hangs: (
        None,
        [
            r"^the ranks hang: no progress in 3 s\.",
            r"rank 0 has waited .* s in collective 3, .* of 8 float32 \(backward, bl",
            r"rank 1 has finished collective 2, .* at line \d+ of hangs \(.*faults.py",
        ],
    ),
    calls_another: (
        None,
        [
            re.escape(DIFFERENT),
            r"rank 0 has waited .* s in collective 2, gather_objects",
            r"rank 1 has waited .* s in collective 2, all_reduce of 8 float32",
        ],
    ),
    calls_fewer: (
        None,
        [
            re.escape(ALONE),
            r"rank 0 has waited .* s in collective 2, all_reduce of 8 float32",
            r"rank 1 has returned",
        ],
    ),
}


@pytest.fixture(autouse=True, scope="module")
def mark():
    """What all that these tests start has in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIZERO_TEST", mark := f"{os.getpid()}-{time.monotonic()}")
        launch(rank, 1)  # the server stays, and with it multiprocessing's folder
        yield mark


@pytest.fixture(autouse=True)
def nothing_left(mark, tmp_path, monkeypatch):
    """Fails if a process or a file that a test has made outlives it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    limit = time.monotonic() + SLACK
    while alive := marked(mark):
        assert time.monotonic() < limit, alive
        time.sleep(0.05)
    assert [p for name in ("minizero-*", "pymp-*") for p in tmp_path.glob(name)] == []


def line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def servers(pid):
    """What ranks of a process are forked from; they have the same command line."""
    children = psutil.Process(pid).children()
    return [child for child in children if "forkserver" in line(child)]


def marked(mark):
    own = servers(os.getpid())  # it stays for other tests, but its ranks do not
    found = []
    for process in psutil.process_iter():
        try:
            there = process.environ().get("MINIZERO_TEST") == mark
            there |= process.ppid() in [server.pid for server in own]
            # The resource tracker lives as long as its parent, which is this process.
            ours = process in own or "resource_tracker" in line(process)
            if there and not ours and process.status() != "zombie":
                found.append(line(process))
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_becomes_one_error(fault, tmp_path, capfd, monkeypatch):
    culprit, patterns = FAULTS[fault]
    monkeypatch.setattr(pool, "LEAVE", 1000)  # the cause comes, however late
    with pytest.raises(RankError) as caught:
        if fault is not hangs:  # it must not wait for the timeout
            launch(fault, 2, tmp_path, timeout=1000)
        with Pool(2) as ranks:
            ranks.run(meet)  # with all that a rank imports at first
            ranks.timeout = 3
            ranks.run(hangs, tmp_path)
    assert caught.value.rank == culprit
    for pattern in patterns:
        assert caught.match(pattern)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err
    if fault is raises:
        shown = ["[rank 0] begun", "[rank 1] begun", "[rank 1] ending"]
        assert captured.out.splitlines() == shown


def test_a_pool_ends_when_a_rank_has_died_between_calls():
    with Pool(2, timeout=60) as pool:
        os.kill(pool.run(os.getpid)[1], signal.SIGKILL)
        died = r"(?s)rank 1 was killed by SIGKILL.*memory.*All ranks were ended\.$"
        with pytest.raises(RankError, match=died):
            pool.run(meet)
        assert not pool.alive
        pool.close()


def test_ranks_that_are_quicker_than_their_parent(monkeypatch):
    """What they report before the parent looks counts too."""
    send = Connection.send_bytes

    def slow(pipe, task):
        send(pipe, task)
        time.sleep(0.5)

    with Pool(2, timeout=20) as pool:
        monkeypatch.setattr(Connection, "send_bytes", slow)
        with pytest.raises(RankError, match=re.escape(DIFFERENT)):
            pool.run(lambda: comm.broadcast(torch.ones(8)) if rank() else meet())


def is_last():
    """Rank 1 returns at once from a call in which rank 0 still waits."""
    report("waits", call := Report(0.0, "", 1, "a call", 7, (0, 1)))
    if rank() == 0:
        time.sleep(2)
    else:
        report("done", call)
    return rank()


def test_a_rank_has_made_what_it_returned_from():
    assert launch(is_last, 2) == [0, 1]


# What reports prove, and what they do not.


@pytest.fixture
def look(monkeypatch):
    """Plays reports of three ranks (when, rank, state, number, what) up to a time.

    Returns the first verdict, and when it fell.
    """
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def play(plan, until, returned=()):
        waiting = {0, 1, 2} - {*returned}
        made = {r: [] for r in range(3)}
        for tick in range(int(until * 10) + 1):
            clock[0] = 100 + tick / 10
            for when, r, state, number, what, *group in plan:
                if round(when * 10) == tick:
                    ranks = group[0] if group else (0, 1, 2)
                    checksum = sum(what.encode())
                    call = Report(clock[0], state, number, what, checksum, ranks)
                    made[r].append(call)
            posts = {r: Post(made[r]) for r in made}
            if why := verdict(posts, waiting, 100.0, 10.0):
                return why, tick / 10
        return None

    return play


HANG = "the ranks hang: no progress in 10 s"


def waits(number, *ranks, at=0.0, what="a", state="waits", group=(0, 1, 2)):
    return [(at, r, state, number, what, group) for r in ranks]


AHEAD = waits(5, 0) + waits(6, 2, at=1, what="b")
GOES_ON = [(0.4 * i, r, "waits", i + 1, f"{i}") for i in range(50) for r in (0, 1)]
QUEUED = [
    (0.1 * i, r, "queued", i + 1, "ab"[r // 2]) for i in range(90) for r in (0, 2)
]
LAST = waits(4, 0, state="done")
VERDICTS = {
    "different calls": (waits(5, 0) + waits(5, 2, at=1, what="b"), {}, DIFFERENT, 2),
    "on a device nobody waits": (QUEUED, {"until": 8}, DIFFERENT, 1),
    "a rank is ahead": (AHEAD, {}, None, 0),
    "two go on": (GOES_ON, {"until": 19}, None, 0),
    "all may come": (LAST + waits(5, 1, 2), {}, None, 0),
    "one has returned": (LAST + waits(5, 1, 2), {"returned": [0]}, ALONE, 1),
    "it was there": (
        waits(5, 0, state="done") + waits(5, 1, 2), {"returned": [0]}, None, 0
    ),
    "it never came": (waits(1, 1, 2), {"returned": [0]}, ALONE, 1),
    "it is in no such group": (
        LAST + waits(5, 1, 2, group=(1, 2)), {"returned": [0]}, None, 0
    ),
    "groups make their own calls": (
        waits(5, 0, group=(0,)) + waits(5, 1, 2, what="b", group=(1, 2)), {}, None, 0
    ),
    "a group's calls differ": (
        waits(5, 1, group=(1, 2)) + waits(5, 2, what="b", group=(1, 2)),
        {}, DIFFERENT, 1,
    ),
    "a report postpones": (waits(1, 0, at=5, state="done"), {"until": 30}, HANG, 15),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_what_reports_prove(look, case):
    plan, how, why, when = VERDICTS[case]
    found = look(plan, **{"until": 9, **how})
    if why is None:
        assert found is None
    else:
        assert found[0].startswith(why) and when <= found[1] < when + 0.5


# Ctrl-C.


def test_an_interrupt_as_a_rank_starts(monkeypatch):
    """It has been started, but its parent does not know of it yet."""
    read = multiprocessing.forkserver.read_signed
    monkeypatch.setattr(
        multiprocessing.forkserver,
        "read_signed",
        lambda fd: read(fd) and os.kill(os.getpid(), signal.SIGINT),
    )
    with pytest.raises(KeyboardInterrupt):
        Pool(2)


def test_interrupts_again_and_again(monkeypatch):
    """They do not keep the parent from ending its ranks."""
    kill = pool.Child.kill

    def pressed(child):
        os.kill(os.getpid(), signal.SIGINT)
        kill(child)

    monkeypatch.setattr(pool.Child, "kill", pressed)
    parent = os.getpid()
    with Pool(2) as ranks, pytest.raises(KeyboardInterrupt):
        ranks.run(lambda: os.kill(parent, signal.SIGINT) or time.sleep(1000))
    assert not ranks.alive


# The parent ends. It is a rank itself, which has ranks.


def kills(when):
    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    dist.destroy_process_group()  # forks would have it, and need not import torch
    pool.Process = multiprocessing.get_context("fork").Process
    if when == "ranks start":
        start = pool.Child.start
        pool.Child.start = lambda child: start(child) or end()
    ranks = Pool(2)
    if when == "they work":
        ranks.run(lambda parent: os.kill(parent, signal.SIGKILL) or meet(), os.getpid())
    end()


@pytest.mark.parametrize("when", ["ranks start", "they are idle", "they work"])
def test_the_parent_is_killed(when):
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
        launch(kills, 1, when)


PROGRAM = """
    import os, shutil, sys, time
    from minizero.ranks import Pool

    def slowly():
        remove = shutil.rmtree
        shutil.rmtree = lambda *a, **b: time.sleep(0.5) or remove(*a, **b)
        return os.getpid()

    pool = Pool(2)
    try:
        pool.run(lambda: print("ready") or time.sleep(1000))
    except KeyboardInterrupt:
        print("interrupted", pool.alive)
    pool = Pool(2)
    pids = pool.run(slowly)
    fork = os.fork()  # it has the parent's ends of all pipes to the ranks
    if fork == 0:
        time.sleep(1000)
    print(fork, *pids)
    pool.run(time.sleep, 1000)
    """


@pytest.mark.thorough
def test_a_program_is_interrupted_and_killed():
    """Its ranks end too, and delete what it had made; what it has forked lives on.

    A terminal sends Ctrl-C to all processes of a session.
    """
    script = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "TMPDIR": tempfile.tempdir, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert script.stdout.readline() == "[rank 0] ready\n"
    os.killpg(script.pid, signal.SIGINT)
    assert script.stdout.readline() == "interrupted False\n"
    fork, *pids = map(int, script.stdout.readline().split())
    script.kill()
    script.wait()
    limit = time.monotonic() + SLACK
    try:
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        script.stdout.close()
