"""What several test files share."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minizero.launch import Pool

# A shell starts a command in the background with interrupts ignored, and what a test
# starts would inherit that; some tests are about interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., str]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> None:
    """What earlier files have left in reference cycles would be counted as live."""
    gc.collect()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Run:
    """Runs a program of this environment; a failure shows what it printed."""

    def run(name: str, *arguments: object, cwd: Path = ROOT) -> str:
        program = Path(sys.executable).with_name(name)
        done = subprocess.run(
            [program, *map(str, arguments)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            pytest.fail(f"{name} {' '.join(map(str, arguments))}\n{done.stdout}")
        return done.stdout

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test on `pool` runs on 1 to 4 ranks, or on as many as its file names."""
    if "pool" in metafunc.fixturenames and not hasattr(metafunc.module, "pool"):
        ranks = getattr(metafunc.module, "RANKS", (1, 2, 3, 4))
        ids = "{} ranks".format
        metafunc.parametrize("pool", ranks, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool
