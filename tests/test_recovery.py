"""Killed ranks, lost nodes: a run goes on from its last checkpoint, with its losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import ip
from recovery import Job, history, train

from minizero import launch

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds; a machine that does much else is slow


@pytest.mark.thorough
def test_kills_at_every_moment(tmp_path: Path) -> None:
    """Of one rank or of all, in a step, in a save or beside one; see kills.py."""
    script = [sys.executable, str(HERE / "kills.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert all(kills.values()) and sum(kills.values()) > 150


class Node:
    """One machine of a torchrun job: an agent and its ranks."""

    def __init__(self, job: Job, options: list[str], *before: str, **settings: str):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        words = vars(job) | {"timeout": 15}
        self.command = [
            *before,
            *torchrun,
            str(HERE / "recovery.py"),
            json.dumps(words),
        ]
        self.log = Path(f"{job.folder}-output")
        self.settings = os.environ | {"OMP_NUM_THREADS": "1"} | settings
        self.start()

    def start(self) -> None:
        """Start its agent, as a supervisor would after a reboot."""
        with open(self.log, "ab") as log:
            options = {"stdout": log, "stderr": log, "env": self.settings}
            self.agent = subprocess.Popen(self.command, **options)

    def kill(self) -> None:
        """End it and all that it has started, as a loss of power does."""
        try:
            parent = psutil.Process(self.agent.pid)
            parent.suspend()  # it starts nothing more
            tree = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            tree = []
        for member in tree:
            member.kill()
        self.agent.wait()
        psutil.wait_procs(tree, PATIENCE)

    def ends_well(self) -> None:
        """Wait until its agent has ended, without an error."""
        assert self.agent.wait(PATIENCE) == 0, self.log.read_text()[-6000:]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Those that the test puts in here are ended with it."""
    some: list[Node] = []
    yield some
    for node in some:
        node.kill()


def until(happened: Callable[[], bool], nodes: list[Node]) -> None:
    """Wait for it, as long as all nodes run."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        for node in nodes:
            assert node.agent.poll() is None, node.log.read_text()[-6000:]
        time.sleep(0.05)


def rendezvous(here: bool) -> list[str]:
    """torchrun's options on one of two nodes; `here` is where the ranks meet."""
    settings = {
        "is_host": "true" if here else "false",
        "last_call_timeout": 5,  # agents that start together are seconds apart
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 6,
    }
    return [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.213.9.1:29400",
        "--rdzv-id=recovery",
        f"--rdzv-conf={','.join(f'{k}={v}' for k, v in settings.items())}",
        f"--local-addr=10.213.9.{1 if here else 2}",
    ]


@pytest.mark.thorough
def test_a_node_is_cut_off_and_comes_back(
    network: list[str], nodes: list[Node], tmp_path: Path
) -> None:
    """Two nodes of two ranks. The wire of one is pulled out; it is started again."""
    for folder in ("nodes", "whole"):
        (tmp_path / folder).mkdir()
    job = Job(str(tmp_path / "nodes"), steps=10, hold=4, dropout=0.1)
    settings = {
        # Without it an agent that joins later is not told where the ranks meet: those
        # that are there keep to what they agreed on at first (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # What a process that was alone has left there: no way to other nodes.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for i, name in enumerate(network):
        inside = ("ip", "netns", "exec", name)
        nodes.append(Node(job, rendezvous(i == 0), *inside, **settings))
    until(lambda: history(job.folder).saved >= 2, nodes)
    ip(f"-n {network[1]} link set wire down")
    Path(job.folder, "go").touch()
    nodes[1].kill()
    ip(f"-n {network[1]} link set wire up")
    nodes[1].start()
    for node in nodes:
        node.ends_well()
    whole = replace(job, folder=str(tmp_path / "whole"), every=1000, hold=None)
    launch(train, 4, whole)
    seen = history(job.folder)
    assert seen.losses == history(whole.folder).losses and seen.saved == 10
    assert seen.lives[0] == (0, 4) and seen.lives[-1] in [(2, 4), (4, 4)]
