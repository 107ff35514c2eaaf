"""Whatever goes wrong on a rank ends in time, in one clear error, and leaves nothing.

Each fault is repeated MINIZERO_FAULT_REPEATS times (once unless set).
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from minizero import comm
from minizero.ranks import Pool, RankError, launch, rank
from minizero.ranks.reports import ALONE, DIFFERENT, Report, verdict

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook

REPEATS = int(os.environ.get("MINIZERO_FAULT_REPEATS", "1"))
TIMEOUT = 3.0  # of the calls that hang
SLACK = 30.0  # for a machine that is slow to start and to end processes
GONE = "All ranks were ended, and their names are gone."


def meet():
    comm.all_reduce(torch.ones(8))


def raises():
    if rank() == 1:
        raise ValueError("too short\nby two")
    meet()


def is_killed():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


def crashes():
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    meet()


def leaves():
    if rank() == 1:
        sys.exit(3)
    meet()


def leaves_at_once():
    if rank() == 1:
        os._exit(7)
    meet()


def hangs():
    meet()
    if rank() == 1:
        time.sleep(1000)
    with comm.phase("backward", "block.1"):
        meet()


def hangs_unseen():
    if rank() == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def calls_another():
    meet()
    if rank() == 1:
        comm.broadcast(torch.ones(4))
    else:
        meet()


def calls_fewer():
    meet()
    if rank() == 0:
        meet()


def all_raise():
    raise KeyError("missing")


FAULTS = [
    (raises, 1, [r"^rank 1 raised ValueError: too short\n\nTraceback", r"\nby two$"]),
    (is_killed, 1, [r"^rank 1 was killed by SIGKILL\. .*memory"]),
    (crashes, 0, [r"^rank 0 was killed by SIGSEGV\.$"]),
    (leaves, 1, [r"^rank 1 left by sys\.exit\(3\)"]),
    (leaves_at_once, 1, [r"^rank 1 left with exit code 7 before it had finished\.$"]),
    (
        hangs,
        None,
        [
            r"^the ranks hang: no progress in 3 s\.",
            r"rank 0 has waited 3.* s in collective 2, .* of 8 float32 \(backward, bl",
            r"rank 1 has finished collective 1, .* at line \d+ of hangs \(.*faults.py",
        ],
    ),
    (
        hangs_unseen,
        None,
        [
            r"^the ranks hang: no progress in 3 s\.",
            r"rank 0 has entered no collective; it is at line \d+ of hangs_unseen",
        ],
    ),
    (
        calls_another,
        None,
        [
            r"^the ranks are out of step: they have called different collectives\.",
            r"rank 0 has waited .* s in collective 2, all_reduce of 8 float32",
            r"rank 1 has waited .* s in collective 2, broadcast of 4 float32",
        ],
    ),
    (
        calls_fewer,
        None,
        [
            r"^the ranks are out of step: some wait for one that has returned\.",
            r"rank 0 has waited .* s in collective 2, all_reduce of 8 float32",
            r"rank 1 has returned",
        ],
    ),
    (all_raise, 0, [r"^ranks 0, 1 raised KeyError: 'missing'"]),
]


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
    return " ".join(process.cmdline())


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


@pytest.mark.parametrize("fault, culprit, patterns", FAULTS)
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_fault_becomes_one_error(fault, culprit, patterns, repeat, capfd):
    started = time.monotonic()
    # Only what must wait for the timeout may come near it.
    waits = "hang" in patterns[0]
    with pytest.raises(RankError) as caught:
        launch(fault, 2, timeout=TIMEOUT if waits else 1000)
    assert time.monotonic() - started < TIMEOUT + SLACK
    assert caught.value.rank == culprit
    for pattern in patterns:
        assert caught.match(pattern)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err


def test_the_cause_comes_before_its_echoes():
    def work():
        if rank() == 2:
            time.sleep(0.3)
            os._exit(5)
        if rank() == 1:
            time.sleep(0.1)
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        meet()

    with pytest.raises(RankError, match="^rank 2 left with exit code 5"):
        launch(work, 3, timeout=60)


def test_what_ranks_have_started_ends_with_them():
    def work():
        subprocess.Popen(["sleep", "1000"])
        if rank() == 1:
            raise ValueError
        meet()

    with pytest.raises(RankError, match="rank 1 raised ValueError\n"):
        launch(work, 2, timeout=60)


def test_output_up_to_the_fault_is_shown(capsys):
    def work():
        print("begun")
        if rank() == 1:
            print("ending", end="", flush=True)
            os._exit(1)
        meet()

    with pytest.raises(RankError):
        launch(work, 2, timeout=60)
    shown = ["[rank 0] begun", "[rank 1] begun", "[rank 1] ending"]
    assert capsys.readouterr().out.splitlines() == shown


def test_a_pool_ends_when_a_rank_is_stuck():
    pool = Pool(2, timeout=60)
    with pytest.raises(RankError, match=GONE) as caught:
        pool.run(raises)
    assert caught.value.rank == 1
    assert not pool.alive


def test_a_pool_ends_when_a_rank_has_died_between_calls():
    with Pool(2, timeout=60) as pool:
        os.kill(pool.run(os.getpid)[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            pool.run(meet)
        assert not pool.alive


# What the status board proves, and what it does not.


@pytest.fixture
def look(monkeypatch):
    """Plays reports of three ranks (when, rank, state, number, what) up to a time.

    Returns the first verdict, and when it fell.
    """
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def play(plan, until, returned=(), printed=()):
        active, waiting = 100.0, {0, 1, 2} - {*returned}
        reports = {r: [] for r in range(3)}
        for tick in range(int(until * 10) + 1):
            clock[0] = 100 + tick / 10
            for when, r, state, number, what, *group in plan:
                if round(when * 10) == tick:
                    ranks = group[0] if group else (0, 1, 2)
                    checksum = sum(what.encode())
                    made = Report(clock[0], state, number, what, checksum, ranks)
                    reports[r].append(made)
            if tick in [round(when * 10) for when in printed]:
                active = clock[0]
            if why := verdict(reports, waiting, active, 10.0):
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
    "one has returned": (LAST + waits(5, 1, 2), {"returned": [0]}, ALONE, 2),
    "it was there": (
        waits(5, 0, state="done") + waits(5, 1, 2), {"returned": [0]}, None, 0
    ),
    "it never came": (waits(1, 1, 2), {"returned": [0]}, ALONE, 2),
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
    "one waits too long": (
        waits(5, 0, at=2) + [(t, 1, "done", 9 + t, "a") for t in range(30)],
        {"until": 29}, HANG, 12,
    ),
    "a report postpones": (waits(1, 0, at=5, state="done"), {"until": 30}, HANG, 15),
    "so does output": (
        waits(1, 0, at=5, state="done"), {"until": 40, "printed": [12, 21]}, HANG, 31
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_what_reports_prove(look, case):
    reports, how, why, when = VERDICTS[case]
    found = look(reports, **{"until": 9, **how})
    if why is None:
        assert found is None
    else:
        assert found[0].startswith(why) and when <= found[1] < when + 0.5


# Faults of the parent: scripts of their own, which a test interrupts or kills.


def script(text):
    head = f"""
    import sys, threading, time
    sys.path[:0] = [{os.getcwd()!r}]
    import torch
    from minizero import comm
    from minizero.ranks.launch import Pool, launch, rank
    """
    program = textwrap.dedent(head + text)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        env={**os.environ, "TMPDIR": tempfile.tempdir},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process, text):
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def wait_for_ranks(process, ranks=1):
    """Until the script has started its ranks, which may not be ready."""
    while not any(len(each.children()) >= ranks for each in servers(process.pid)):
        assert process.poll() is None
        time.sleep(0.01)


SLEEPS = """
    def work():
        print("ready")
        time.sleep(1000)
    """
BLOCKED = """
    def work():
        if rank() == 1:
            time.sleep(1000)
        threading.Timer(1, print, ["ready"]).start()  # when it has long been blocked
        comm.all_reduce(torch.ones(1))
    """
LAUNCH = """
    launch(work, 2, timeout=60)
    """
POOL = """
    pool = Pool(2, timeout=60)
    pool.execute("x = 5")
    try:
        pool.run(work)
    except KeyboardInterrupt as error:
        print(error)
    print(pool.alive and pool.pull("x"))
    """


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("body", [SLEEPS, BLOCKED], ids=["busy", "blocked"])
def test_the_parent_is_killed(body, end, repeat):
    process = script(body + LAUNCH)
    read_until(process, "ready")
    process.send_signal(end)
    process.wait()


def test_the_parent_is_killed_at_the_start():
    process = script(SLEEPS + LAUNCH)
    wait_for_ranks(process)
    process.kill()
    process.wait()


def test_the_parent_is_killed_but_not_what_it_has_forked():
    """That has the parent's ends of all pipes to the ranks."""
    process = script("""
    import os
    pool = Pool(2, timeout=60)
    pids = pool.run(os.getpid)
    if fork := os.fork():
        print("fork", fork, *pids, flush=True)
        pool.run(time.sleep, 1000)
    time.sleep(1000)
    """)
    fork, *pids = map(int, read_until(process, "fork").split()[1:])
    process.kill()
    process.wait()
    limit = time.monotonic() + SLACK
    try:
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        os.kill(fork, signal.SIGKILL)


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("body", [SLEEPS, BLOCKED], ids=["busy", "blocked"])
def test_a_terminal_interrupts(body, repeat):
    process = script(body + LAUNCH)
    read_until(process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=SLACK)[0]
    assert process.returncode == -signal.SIGINT
    assert rest.count("Traceback") == rest.count("\nKeyboardInterrupt") == 1


@pytest.mark.parametrize("ranks", [0, 1], ids=["server", "ranks"])
def test_a_terminal_interrupts_the_start(ranks):
    process = script(SLEEPS + LAUNCH)
    wait_for_ranks(process, ranks)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=SLACK)[0]
    assert process.returncode == -signal.SIGINT
    assert "\nKeyboardInterrupt" in rest  # and what half-made processes say of it
    assert "\nready" not in rest and "] ready" not in rest


def test_an_interrupt_keeps_a_pool():
    process = script(SLEEPS + POOL)
    read_until(process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=SLACK)[0].splitlines()
    assert rest == ["[rank 1] ready", "The ranks were interrupted.", "[5, 5]"]


def test_an_interrupt_reaches_a_rank_that_has_not_begun():
    """Until its task begins a rank ignores interrupts."""
    stop = "print(pid := pool.run(os.getpid)[1]); os.kill(pid, signal.SIGSTOP)"
    pool = POOL.replace("try:", f"import os, signal; {stop}\n    try:")
    process = script(SLEEPS + pool)
    pid = int(read_until(process, "\n"))
    read_until(process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)
    rest = process.communicate(timeout=SLACK)[0].splitlines()
    assert rest[-2:] == ["The ranks were interrupted.", "[5, 5]"]


def test_an_interrupt_ends_a_pool_that_is_stuck():
    process = script(BLOCKED + POOL)
    read_until(process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=SLACK)[0]
    assert f"Ranks [0] did not react to the interrupt. {GONE}\nFalse\n" in rest


def test_a_script_may_leave_its_pool_open():
    process = script("""
    pool = Pool(2, timeout=60)
    print(pool.run(rank))
    """)
    assert process.communicate(timeout=SLACK)[0] == "[0, 1]\n"
    assert process.returncode == 0


# Under torchrun there is no parent that looks.


UNLIKE = """
    import sys
    import torch, torch.distributed as dist
    from minizero import comm
    from minizero.ranks import init_distributed, rank
    dist.init_process_group("gloo") if "own" in sys.argv else init_distributed()
    comm.all_reduce(torch.ones(8))
    with comm.phase("forward", f"blocks.{rank()}"):
        comm.all_gather(torch.empty(4), torch.ones(2))
    """
WRONG = """
    from minizero.ranks import init_distributed
    init_distributed()
    raise ValueError("no key 'zero_optimisation'")
    """


def torchrun(tmp_path, text, *arguments):
    """What two ranks print to stderr, without torchrun's own words."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(program), *arguments],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    return re.split(r"(?m)^E\d", done.stderr)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["own", "ours"])
def test_torchrun_ranks_that_call_differently_end_with_a_report(tmp_path, how):
    """Whoever has made the process group, and long before its timeout."""
    shown = torchrun(tmp_path, UNLIKE, how)
    assert shown.count(DIFFERENT) == 1 and "Traceback" not in shown
    for r in (0, 1):
        call = f"all_gather of 4 float32 (forward, blocks.{r}); it is at line 9 of"
        assert re.search(rf"rank {r} has waited .* s in collective 2, ", shown)
        assert call in shown


@pytest.mark.thorough
def test_one_torchrun_rank_tells_the_error_of_all(tmp_path):
    shown = torchrun(tmp_path, WRONG)
    assert shown.count("ValueError: no key 'zero_optimisation'") == 1
