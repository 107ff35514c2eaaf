"""What the script trains, under DeepSpeed and under minizero: the record's cases.

A run of tests/deepspeed_runs.json has a name, a case, `why` there is one where that
does not show, and what DeepSpeed did. To add one, write the first two there and run
`make parity ARGS=--record`. `script.train` says what a case may have. Its `ours` is
what minizero does otherwise, to get what DeepSpeed gets. Stage 3 comes last: DeepSpeed
replaces torch's linear function there, for the rest of the process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

FILE = Path(__file__).parents[1] / "deepspeed_runs.json"
RECORD = json.loads(FILE.read_text())
CASES: dict[str, Config] = {run["name"]: run["case"] for run in RECORD["runs"]}


def stage_of(case: Config) -> int:
    return case["config"]["zero_optimization"]["stage"]
