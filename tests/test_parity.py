"""One training script on DeepSpeed and here: the same losses, norms, scales, skips.

DeepSpeed's half is recorded (`make parity ARGS=--record`); `make parity` runs both.
"""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from nasty import some
from parity.cases import CASES, RECORD
from parity.compare import Seen, differs, flatten
from parity.script import train

import minizero
from minizero.ranks import Pool

THEIRS: dict[str, Seen] = {run["name"]: run["seen"] for run in RECORD["runs"]}


def here(name: str, **other: Any) -> Seen:
    case = CASES[name]
    return train(minizero, {**case, **case.get("ours", {}), **other})


FEW = {"adam-3", "sgd-1", "fp16-2", "bf16-2", "offload-3"}


@pytest.mark.parametrize("name", some(CASES, lambda name: name not in FEW))
@pytest.mark.filterwarnings("ignore:cycle_momentum")
def test_as_deepspeed(two: Pool, name: str) -> None:
    ours = two.run(here, name)[0]
    assert not differs(CASES[name], ours, THEIRS[name])


@pytest.mark.parametrize("name", ["growth-2", "growth-3", "static-0"])
def test_these_updates_are_shorter_in_deepspeed(two: Pool, name: str) -> None:
    """The rates that `ours` sets make up for that, and nothing else does."""
    case = CASES[name]
    rate = case["config"]["optimizer"]["params"]["lr"]
    if name == "static-0":
        rate /= case["config"]["fp16"]["loss_scale"] / 4  # any other length
    ours = two.run(here, name, rates={"0": rate})[0]
    found = differs(case, ours, THEIRS[name])
    assert len(found) >= 2 and any("losses" in sentence for sentence in found)
    if name != "static-0":
        # as long as the scale has not grown, they agree
        assert ours["scales"].index(2048.0) == 4
        first = {key: values[:5] for key, values in ours.items()}
        before = {key: values[:5] for key, values in THEIRS[name].items()}
        assert not differs(case, first, before)


def test_bf16_is_close_enough_to_tell(two: Pool) -> None:
    """Clipping that is a little other is farther off than bf16 may be."""
    config = CASES["bf16-2"]["config"] | {"gradient_clipping": 0.55}
    ours = two.run(here, "bf16-2", config=config)[0]
    assert differs(CASES["bf16-2"], ours, THEIRS["bf16-2"])
    fp32 = two.run(here, "bf16-2", config=config | {"bf16": {"enabled": False}})[0]
    assert ours["losses"][0] != fp32["losses"][0]


def test_training_is_compared() -> None:
    """Losses fall, gradients are clipped, steps are skipped, scales grow."""
    for name, seen in THEIRS.items():
        losses = [float(loss) for loss in seen["losses"] if float(loss) < 1e6]
        if "fp16-0" not in name:
            assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), name
    clipping = CASES["sgd-2"]["config"]["gradient_clipping"]
    assert sum(norm > clipping for norm in THEIRS["sgd-2"]["norms"]) > 15
    for stage in range(4):
        seen = THEIRS[f"fp16-{stage}"]
        assert seen["skipped"][-1] == 3
        changes = [b / a for a, b in pairwise(seen["scales"]) if a != b]
        assert {0.5, 2.0} == set(changes)
        assert seen["applied"].count(False) == 3


def test_a_difference_is_found() -> None:
    seen, case = THEIRS["sgd-3"], CASES["sgd-3"]
    assert not differs(case, seen, seen)
    for key, index in (("losses", 7), ("norms", 3), ("lrs", 2)):
        other = copy.deepcopy(seen)
        wrong = [1.001 * value for value in flatten(other[key][index])]
        other[key][index] = wrong
        assert len(differs(case, other, seen)) == 1
    fp16 = THEIRS["fp16-2"]
    for key in ("skipped", "scales", "counts"):
        other = copy.deepcopy(fp16)
        other[key] = other[key][1:] + other[key][:1]
        assert differs(CASES["fp16-2"], other, fp16)


@pytest.mark.thorough
def test_the_script_runs_as_it_stands(root: Path, tool: Run) -> None:
    """Under torchrun, with the module's name as its only difference."""
    script = root / "tests" / "parity" / "script.py", "minizero.deepspeed", "sgd-2"
    out = tool("torchrun", "--standalone", "--nproc_per_node", 2, *script)
    (line,) = (line for line in out.splitlines() if line.startswith('{"case"'))
    assert not differs(CASES["sgd-2"], json.loads(line)["seen"], THEIRS["sgd-2"])
