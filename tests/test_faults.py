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
from multiprocessing.connection import Connection

import cloudpickle
import psutil
import pytest
import torch

from minizero import comm
from minizero.ranks import Pool, RankError, launch, rank
from minizero.ranks.reports import ALONE, DIFFERENT, Report, verdict

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook

REPEATS = range(int(os.environ.get("MINIZERO_FAULT_REPEATS", "1")))
SLACK = 60.0  # for a machine that is slow to start and to end processes
GONE = "All ranks were ended, and their names are gone."


def meet():
    comm.all_reduce(torch.ones(8))


def raises(folder):
    subprocess.Popen(["sleep", "1000"])  # which ends with the rank
    print("begun")
    if rank() == 1:
        print("ending", end="", flush=True)
        raise ValueError("too short\nby two")
    meet()


def is_killed(folder):
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


def leaves_at_once(folder):
    """After rank 0 has told of the lost peer, which is only an echo."""
    if rank() == 0:
        (folder / "told").touch()
        raise RuntimeError("Connection closed by peer [127.0.0.1]")
    while not (folder / "told").exists():
        time.sleep(0.01)
    os._exit(7)


def hangs(folder):
    meet()
    if rank() == 1:
        time.sleep(1000)
    with comm.phase("backward", "block.1"):
        meet()


def calls_another(folder):
    meet()
    if rank() == 1:
        comm.broadcast(torch.ones(4))
    else:
        meet()


def calls_fewer(folder):
    meet()
    if rank() == 0:
        meet()


def saves_alone(folder):
    meet()
    if rank() == 0:
        comm.gather_objects("what it saves")
    else:
        meet()


FAULTS = {
    raises: (1, [r"^rank 1 raised ValueError: too short\n\nTraceback", r"\nby two$"]),
    is_killed: (1, [r"^rank 1 was killed by SIGKILL\. .*memory"]),
    leaves_at_once: (1, [r"^rank 1 left with exit code 7 before it had finished\.$"]),
    hangs: (
        None,
        [
            r"^the ranks hang: no progress in 3 s\.",
            r"rank 0 has waited 3.* s in collective 2, .* of 8 float32 \(backward, bl",
            r"rank 1 has finished collective 1, .* at line \d+ of hangs \(.*faults.py",
        ],
    ),
    calls_another: (
        None,
        [
            re.escape(DIFFERENT),
            r"rank 0 has waited .* s in collective 2, all_reduce of 8 float32",
            r"rank 1 has waited .* s in collective 2, broadcast of 4 float32",
        ],
    ),
    saves_alone: (
        None,
        [
            re.escape(DIFFERENT),
            r"rank 0 has waited .* s in collective 2, gather_objects .* of saves_alone",
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
@pytest.mark.parametrize("repeat", REPEATS)
def test_a_fault_becomes_one_error(fault, repeat, tmp_path, capfd):
    culprit, patterns = FAULTS[fault]
    with pytest.raises(RankError) as caught:
        # Only what must wait for the timeout may come near it.
        launch(fault, 2, tmp_path, timeout=3.0 if fault is hangs else 1000)
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
        with pytest.raises(
            RankError, match=f"rank 1 was killed by SIGKILL.*\n\n{GONE}"
        ):
            pool.run(meet)
        assert not pool.alive


# What reports prove, and what they do not.


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


class Script:
    """A program in a session of its own, as if typed in a terminal."""

    def __init__(self, text):
        head = f"""
    import os, signal, sys, time
    sys.path[:0] = [{os.getcwd()!r}]
    import torch
    from minizero import comm
    from minizero.ranks.launch import Pool, launch, rank
    """
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(head + text)],
            env={**os.environ, "TMPDIR": tempfile.tempdir},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, text):
        """The line of its output that has this text."""
        seen = line = ""
        while text not in line:
            line = self.process.stdout.readline()
            seen += line
            assert line, seen
        return line

    def interrupt(self):
        """Ctrl-C goes to the whole session."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait()

    def rest(self):
        return self.process.communicate(timeout=SLACK)[0]


KILLED = """
    pool = Pool(2)
    pids = pool.run(os.getpid)
    fork = os.fork()  # it has the parent's ends of all pipes to the ranks
    if fork == 0:
        time.sleep(1000)
    def work():
        print("ready", fork, *pids)
        if rank() == 0:
            comm.all_reduce(torch.ones(1))
        time.sleep(1000)
    pool.run(work)
    """


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_parent_is_killed(end, repeat):
    """Ranks end, in a collective or at work; what the parent has forked does not."""
    script = Script(KILLED)
    fork, *pids = map(int, script.until("ready").split()[3:])
    script.end(end)
    limit = time.monotonic() + SLACK
    try:
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_parent_is_killed_while_ranks_have_no_task():
    """None leaves before it has deleted what the parent had made."""
    script = Script("""
    def slowly():
        import shutil
        remove = shutil.rmtree
        shutil.rmtree = lambda *a, **b: time.sleep(0.5) or remove(*a, **b)
    pool = Pool(2)
    pool.run(slowly)
    print("ready")
    time.sleep(1000)
    """)
    script.until("ready")
    script.end(signal.SIGKILL)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_the_parent_ends_as_ranks_start(end):
    script = Script("launch(time.sleep, 2, 1000)")
    while not any(
        os.getpgid(rank.pid) == rank.pid  # it serves
        for server in servers(script.process.pid)
        for rank in server.children()
    ):
        assert script.process.poll() is None
        time.sleep(0.01)
    if end == signal.SIGKILL:
        script.end(end)
    else:
        script.interrupt()
        assert "\nKeyboardInterrupt" in script.rest()
    assert script.process.returncode == -end


def differ():
    comm.broadcast(torch.ones(8)) if rank() else meet()


def test_ranks_that_are_quicker_than_their_parent(monkeypatch):
    """What they report before the parent looks counts too."""
    send = Connection.send_bytes

    def slow(pipe, task):
        send(pipe, task)
        time.sleep(0.5)

    with Pool(2, timeout=20) as pool:
        monkeypatch.setattr(Connection, "send_bytes", slow)
        with pytest.raises(RankError, match=re.escape(DIFFERENT)):
            pool.run(differ)


INTERRUPTED = """
    def work(how):
        if how == "deaf":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready")
        try:
            time.sleep(1000)
        finally:
            print("recalled")

    pool = Pool(2)
    pool.execute("x = 5")
    for how in "busy", "stopped", "deaf":
        if how == "stopped":  # until its task begins a rank ignores interrupts
            print("stopped", pid := pool.run(os.getpid)[1])
            os.kill(pid, signal.SIGSTOP)
        try:
            pool.run(work, how)
        except KeyboardInterrupt as error:
            print(error)
        print("then", pool.alive and pool.pull("x"))
    launch(work, 2, "busy")
    """


@pytest.mark.parametrize("repeat", REPEATS)
def test_a_terminal_interrupts(repeat):
    """A pool lives on if its ranks come back; a launch ends."""
    script = Script(INTERRUPTED)
    for how in "busy", "stopped", "deaf", "launched":
        stopped = how == "stopped" and int(script.until("stopped").split()[1])
        script.until("[rank 0] ready")
        script.interrupt()
        if stopped:
            script.until("[rank 0] recalled")
            os.kill(stopped, signal.SIGCONT)
        if how == "launched":
            continue
        said, kept = "The ranks were interrupted.", "[5, 5]"
        if how == "deaf":
            said, kept = "Ranks [0, 1] did not react to the interrupt.", "False"
        script.until(said)
        assert script.until("then") == f"then {kept}\n"
    rest = script.rest()
    assert script.process.returncode == -signal.SIGINT
    assert rest.count("Traceback") == rest.count("\nKeyboardInterrupt") == 1


# Under torchrun there is no parent that looks.


UNLIKE = """
    import torch, torch.distributed as dist
    from minizero import comm
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    comm.all_reduce(torch.ones(8))
    with comm.phase("forward", f"blocks.{rank}"):
        comm.all_gather(torch.empty(4), torch.ones(2))
    """
WRONG = """
    from minizero.ranks import init_distributed
    init_distributed()
    raise ValueError("no key 'zero_optimisation'")
    """


def torchrun(tmp_path, text):
    """What two ranks print to stderr, without torchrun's own words."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(program)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    return re.split(r"(?m)^E\d", done.stderr)[0]


@pytest.mark.thorough
def test_torchrun_ranks_that_call_differently_end_with_a_report(tmp_path):
    """Whoever has made the process group, and long before its timeout."""
    shown = torchrun(tmp_path, UNLIKE)
    assert shown.count(DIFFERENT) == 1 and "Traceback" not in shown
    for r in (0, 1):
        call = f"all_gather of 4 float32 (forward, blocks.{r}); it is at line 8 of"
        assert re.search(rf"rank {r} has waited .* s in collective 2, ", shown)
        assert call in shown


@pytest.mark.thorough
def test_one_torchrun_rank_tells_the_error_of_all(tmp_path):
    shown = torchrun(tmp_path, WRONG)
    assert shown.count("ValueError: no key 'zero_optimisation'") == 1
