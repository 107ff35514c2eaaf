"""Killed ranks, lost nodes: the run goes on from its last checkpoint, with its losses.

MINIZERO_FAULT_REPEATS times 6 runs are killed at random moments (once unless set).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from conftest import ip
from recovery import History, Job, history, train

from minizero.__main__ import main
from minizero.lab import training
from minizero.ranks.launch import Pool, launch

SCRIPT = str(Path(__file__).with_name("recovery.py"))
REPEATS = int(os.environ.get("MINIZERO_FAULT_REPEATS", "1"))
PATIENCE = 300.0  # seconds; a machine that does much else is slow


def until(happened: Callable[[], bool], what: str, nodes: Sequence[Node] = ()) -> None:
    """Wait for it, as long as all nodes run."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        for node in nodes:
            assert node.started[-1].poll() is None, f"{what}: {node.output()}"
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started, wherever it put them."""
    try:
        parent = psutil.Process(process.pid)
        parent.suspend()  # it starts nothing more
        tree = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        member.kill()
    process.wait()
    psutil.wait_procs(tree, PATIENCE)


@dataclass
class Node:
    """One machine of a torchrun job: an agent and its ranks."""

    folder: Path
    options: list[str]
    job: list[str]
    before: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start its agent, as a supervisor would after a reboot."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", *self.options]
        script = [SCRIPT, str(self.folder), *self.job]
        with open(f"{self.folder}-output", "ab") as output:
            agent = subprocess.Popen(
                [*self.before, *torchrun, *script],
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.settings,
            )
        self.started.append(agent)

    def kill(self) -> None:
        """End it as a loss of power does."""
        for agent in self.started:
            kill_tree(agent)

    def ends_well(self) -> None:
        """Wait until its agent has ended, without an error."""
        try:
            status = self.started[-1].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        assert status == 0, self.output()

    def output(self) -> str:
        """The last of what all nodes have printed."""
        return Path(f"{self.folder}-output").read_text()[-6000:]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Those that the test puts in here are ended with it."""
    some: list[Node] = []
    yield some
    for node in some:
        node.kill()


def unbroken(pool: Pool, folder: Path, **options: float) -> dict[int, float]:
    """The losses of the job when nobody is killed."""
    pool.run(train, Job(folder=str(folder), every=1000, **options))
    return history(folder).losses


# Without it an agent that joins later is not told where the ranks meet: those that
# are there already keep to what they agreed on at first (torch 2.13).
FRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# What a process that was alone has left in the environment: no way to other nodes.
ALONE = {"GLOO_SOCKET_IFNAME": "lo"}


def lives(seen: History) -> list[tuple[int, int]]:
    """Where each began, and on how many ranks."""
    return list(zip(seen.starts, seen.ranks, strict=True))


def free_port() -> int:
    """Not one that the system may give to a connection before it is used."""
    ports = list(range(20_000, 30_000))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def rendezvous(host: str, port: int, here: bool, nodes: str, ranks: int) -> list[str]:
    """torchrun's options on a node; `here` is where the rendezvous is kept."""
    settings = {
        "is_host": "true" if here else "false",
        "last_call_timeout": 5,  # agents that start together are seconds apart
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 6,
    }
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        "--rdzv-id=recovery",
        f"--rdzv-conf={','.join(f'{k}={v}' for k, v in settings.items())}",
    ]


def test_torchrun_starts_killed_ranks_again_and_then_fewer(
    two: Pool, nodes: list[Node], tmp_path: Path
) -> None:
    """Two agents of a rank each: a rank is killed, then an agent with its rank."""
    (tmp_path / "whole").mkdir()
    expected = unbroken(two, tmp_path / "whole", steps=16)
    folder, port = tmp_path / "killed", free_port()
    folder.mkdir()
    job = ["--steps=16", "--kill=5:1", "--hold=10"]
    for here in (True, False):
        options = rendezvous("127.0.0.1", port, here, "1:2", 1)
        nodes.append(Node(folder, [*options, "--local-addr=127.0.0.1"], job))
        nodes[-1].start()
    until(lambda: history(folder).saved >= 8, "the ranks have not come back", nodes)
    nodes[1].kill()
    (folder / "go").touch()
    nodes[0].ends_well()
    seen = history(folder)
    # An agent that is slow, or thought dead, makes for another life with one rank.
    assert (0, 2) in lives(seen) and (4, 2) in lives(seen), lives(seen)
    last, ranks = lives(seen)[-1]
    assert last in (8, 10) and ranks == 1, lives(seen)
    alike = {step for step, loss in seen.losses.items() if loss == expected[step]}
    if set(seen.ranks[:-1]) == {2}:
        assert set(range(last)) <= alike  # equal bit for bit
        assert not set(seen.differing) & set(range(last))
    assert seen.losses == pytest.approx(expected, rel=1e-4) and len(seen.losses) == 16


def test_a_node_is_cut_off_and_comes_back(
    network: list[str], nodes: list[Node], tmp_path: Path
) -> None:
    """Two nodes of two ranks. The wire of one is pulled out; it is started again."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    job = ["--steps=10", "--hold=4", "--dropout=0.1", "--timeout=15"]
    for i, name in enumerate(network):
        options = rendezvous("10.213.9.1", 29400, i == 0, "2", 2)
        inside = ("ip", "netns", "exec", name)
        local = f"--local-addr=10.213.9.{i + 1}"
        nodes.append(Node(folder, [*options, local], job, inside, FRESH | ALONE))
        nodes[-1].start()
    until(lambda: history(folder).saved >= 2, "the job has not begun", nodes)
    ip(f"-n {network[1]} link set wire down")
    (folder / "go").touch()
    time.sleep(1.0)  # long enough for some steps
    assert len(history(folder).losses) == 4, "the wire is not what they use"
    nodes[1].kill()
    ip(f"-n {network[1]} link set wire up")
    nodes[1].start()
    for node in nodes:
        node.ends_well()
    seen = history(folder)
    whole = tmp_path / "whole"
    whole.mkdir()
    launch(train, 4, Job(folder=str(whole), steps=10, every=1000, dropout=0.1))
    assert seen.losses == history(whole).losses and not seen.differing
    assert lives(seen)[0] == (0, 4) and lives(seen)[-1] in [(2, 4), (4, 4)]
    assert seen.saved == 10


def test_kills_at_random_moments(tmp_path: Path, root: Path) -> None:
    """Of the whole group or of one rank, in a step or in a save; see kills.py."""
    script = [sys.executable, str(root / "tests" / "kills.py")]
    kills, seed = 6 * REPEATS, REPEATS
    done = subprocess.run(
        [*script, str(tmp_path / "runs"), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=PATIENCE + 5 * kills,
    )
    assert done.returncode == 0, done.stderr
    count = json.loads(done.stdout)
    assert count["kills"] == kills
    print(count)


SMALL = "--model 0.1m --steps 8 --batch 6 --sequence 16 --save-every 2".split()


def test_the_main_job_goes_on(two: Pool, tmp_path: Path) -> None:
    """Killed with all its ranks, it makes the report of the run nobody killed."""
    common = {"model": "0.1m", "steps": 8, "batch": 6, "sequence": 16}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    two.run(gc.collect)  # what earlier runs have left would be counted
    expected = two.run(training.train, training.Job(out=str(whole), **common))[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "minizero", "train", "--ranks", "2", *SMALL]
        + ["--out", str(killed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: (killed / "checkpoints/latest").exists(), "it has saved nothing")
    kill_tree(process)
    job = training.Job(out=str(killed), save_every=2, resume=True, **common)
    two.run(gc.collect)
    report = two.run(training.train, job)[0]
    for name in ("losses", "valid_loss", "sample", "bytes", "sent"):
        assert report[name] == expected[name], name
    weights = [(folder / "weights.safetensors") for folder in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert len(list((killed / "checkpoints").glob("*/index.json"))) == job.keep
    # it may go on under another plan, but not with another learning rate
    replace(job, stage=1).check(3)
    with pytest.raises(ValueError, match="has lr 0.002, not 1.0; resume it with"):
        replace(job, lr=1.0).check(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-every", "0"], "save_every must be at least 1, not 0"),
        (["--keep", "0"], "keep must be at least 1, not 0"),
        (["--save-every", "2"], "go on from them with --resume"),
    ],
)
def test_bad_options(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tmp_path / "checkpoints" / "step-2" / "index.json"
    before.parent.mkdir(parents=True)
    before.touch()
    assert main(["train", *SMALL[:-2], *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_nothing_runs_on() -> None:
    """The tests above have ended what they started."""
    own = [p.info["cmdline"] for p in psutil.process_iter(["cmdline", "ppid"])]
    mine = str(os.getpid())
    assert not [line for line in own if line and SCRIPT in line], mine
