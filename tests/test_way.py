"""How many files a weight passes in a step, a save, a load, and to a collective."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import minizero
from minizero.ranks import Pool

PACKAGE = str(Path(minizero.__file__).parent)
CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
}


def own(frame: FrameType) -> str | None:
    """The file of the package that a frame runs, such as "zero/stage3.py"."""
    name = frame.f_code.co_filename
    return name[len(PACKAGE) + 1 :] if name.startswith(PACKAGE) else None


@contextmanager
def entered(found: set[str]) -> Iterator[None]:
    """Note every file of the package in which a function is called, in any thread."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := own(frame)):
            found.add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def ready(config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """An engine that has made its first steps, which learn and allocate."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine, *_ = minizero.initialize(model=net, config=config)
    x = torch.randn(2, 8)
    for _ in range(2):
        step(engine, x)
    return engine, x


def step(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).float().square().mean())
    engine.step()


def files_of_a_step() -> list[str]:
    engine, x = ready(CONFIG)
    found: set[str] = set()
    with entered(found):
        step(engine, x)
    engine.destroy()
    return sorted(found)


def frames_above_gathers() -> list[list[str]]:
    """Of each all-gather of a step: the package's frames since torch called a hook."""
    engine, x = ready(CONFIG)
    found, gather = [], minizero.comm.all_gather

    def seen(*args: Any, **options: Any) -> Any:
        frame, above = sys._getframe(1), []
        while frame and (name := own(frame)):
            above.append(f"{name}:{frame.f_code.co_name}")
            frame = frame.f_back
        found.append(above)
        return gather(*args, **options)

    minizero.comm.all_gather = seen
    try:
        step(engine, x)
    finally:
        minizero.comm.all_gather = gather
    engine.destroy()
    return found


def files_below_a_gather() -> list[str]:
    rows, mine = torch.zeros(2, 4), torch.ones(4)
    minizero.comm.all_gather(rows, mine)  # the first call learns the backend
    found: set[str] = set()
    with entered(found):
        minizero.comm.all_gather(rows, mine, async_op=True).wait()
    return sorted(found)


def files_of_a_checkpoint(folder: str) -> tuple[list[str], list[str]]:
    engine, _ = ready(CONFIG)
    saving: set[str] = set()
    with entered(saving):
        engine.save_checkpoint(folder)
    loading: set[str] = set()
    with entered(loading):
        engine.load_checkpoint(folder)
    engine.destroy()
    kept = ("engine/", "checkpoint/")
    return (
        sorted(name for name in saving if name.startswith(kept)),
        sorted(name for name in loading if name.startswith(kept)),
    )


def test_a_step_enters_few_files(two: Pool) -> None:
    """ZeRO-3 with overlap, offload to the host, and bf16."""
    found = two.run(files_of_a_step)[0]
    print("\n".join(found))
    assert len(found) <= 20, found


def test_a_hook_is_near_its_collective(two: Pool) -> None:
    found = two.run(frames_above_gathers)[0]
    assert found
    longest = max(found, key=len)
    assert len(longest) <= 6, longest


def test_a_gather_enters_few_files(two: Pool) -> None:
    found = two.run(files_below_a_gather)[0]
    assert 0 < len(found) <= 6, found


def test_a_checkpoint_enters_few_files(two: Pool, tmp_path: Path) -> None:
    saving, loading = two.run(files_of_a_checkpoint, str(tmp_path))[0]
    assert 0 < len(saving) <= 6, saving
    assert 0 < len(loading) <= 6, loading


@pytest.mark.parametrize("as_file", [False, True])
def test_a_config_enters_few_files(as_file: bool, tmp_path: Path) -> None:
    source: Any = CONFIG
    if as_file:
        source = tmp_path / "ds_config.json"
        source.write_text(json.dumps(CONFIG))
    from minizero import config

    found: set[str] = set()
    with entered(found):
        config.read(source)
    found = {name for name in found if name.startswith("config/")}
    assert 0 < len(found) <= 5, found
