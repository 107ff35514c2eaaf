"""Trains the same script on DeepSpeed and on minizero, and compares.

    python tests/parity [--record] [case ...]

`--record` keeps DeepSpeed's half in tests/deepspeed_runs.json and what its schedules do
in tests/deepspeed_schedules.json, which the tests compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path.insert(0, str(TESTS))

from parity import cases, rates  # noqa: E402
from parity.cases import CASES  # noqa: E402
from parity.compare import differs, rounded  # noqa: E402


def run(module: str, names: list[str]) -> dict[str, Any]:
    """Rank 0's lines, of two ranks; what else is printed shows if it fails."""
    script = "on_cpu.py" if module == "deepspeed" else "script.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(HERE / script), module, *names]
    paths = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # where DeepSpeed finds ninja, when it builds its fused Adam
    environment["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}" + os.environ["PATH"]
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{module} failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    lines = [x for x in done.stdout.splitlines() if x.startswith('{"case"')]
    return {found["case"]: found["seen"] for found in map(json.loads, lines)}


def keep(path: Path, version: str, **lists: list[Any]) -> None:
    """A value a line."""
    parts = [f'{{"deepspeed": "{version}"']
    for name, values in lists.items():
        lines = ",\n".join(json.dumps(value) for value in values)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    path.write_text(",\n".join(parts) + "}\n")


def record(version: str, seen: dict[str, Any]) -> None:
    runs = [run | {"seen": rounded(seen[run["name"]])} for run in cases.RECORD["runs"]]
    keep(cases.FILE, version, runs=runs)
    from deepspeed.runtime import lr_schedules

    sequences = [rates.sequence(lr_schedules, *s) for s in rates.SETTINGS]
    keep(rates.FILE, version, settings=rates.SETTINGS, sequences=sequences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="names; default: all")
    parser.add_argument("--record", action="store_true", help="of all cases")
    options = parser.parse_args()
    names = options.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        import deepspeed
    except ImportError as error:
        sys.exit(f"DeepSpeed cannot be imported: {error}")
    theirs, ours = run("deepspeed", names), run("minizero", names)
    print(f"DeepSpeed {deepspeed.__version__} and minizero: 2 ranks, gloo")
    failed = 0
    for name in names:
        found = differs(CASES[name], ours[name], theirs[name])
        failed += len(found)
        print(f"{name}: {'; '.join(found) or 'the same'}")
    if options.record:
        record(deepspeed.__version__, {**theirs})
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
