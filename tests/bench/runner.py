"""Runs the benchmarks, and says which ratios keep their bounds.

Speed is only compared within one run: the cases take turns (a, b, a, b, ...), each
turn gives one ratio, and the median of the ratios counts. So a machine that slows
down for a while slows both sides.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

NAMES = tuple(
    info.name
    for info in pkgutil.iter_modules([str(Path(__file__).parent)])
    if info.name not in ("runner", "gpu", "__main__")
)


@dataclass(frozen=True)
class Comparison:
    """What `a` gave against what `b` gave, turn by turn.

    name: what is compared. unit: of both values, such as "s" or "elements/s".
    at_least, at_most: bounds that the median of the ratios a/b should keep.
    """

    name: str
    unit: str
    a: str
    b: str
    a_values: list[float]
    b_values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float:
        """Median of a/b over the turns."""
        pairs = zip(self.a_values, self.b_values, strict=True)
        return statistics.median(x / y for x, y in pairs)

    @property
    def met(self) -> bool:
        """Whether the ratio keeps its bounds; true where there are none."""
        low = self.at_least is None or self.ratio >= self.at_least
        return low and (self.at_most is None or self.ratio <= self.at_most)


def interleaved(
    cases: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """What each case returned, turn by turn; the first `warmup` turns are dropped."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    values: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + repeats):
        for name, case in cases.items():
            value = case()
            if turn >= warmup:
                values[name].append(value)
    return values


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    gpus = torch.cuda.device_count()
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "gpus": gpus,
        "gpu": torch.cuda.get_device_name() if gpus else "none",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The processor's name, which `platform` does not know on Linux."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(results: Sequence[Comparison]) -> str:
    """Medians, ratio and bounds, a line a comparison."""
    lines = [f"{'':44}{'a':>11}{'b':>11}{'a/b':>8}  bound"]
    for c in results:
        medians = (statistics.median(c.a_values), statistics.median(c.b_values))
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (("at least", c.at_least), ("at most", c.at_most))
            if bound is not None
        ]
        met = "met" if c.met else "MISSED"
        verdict = f"{', '.join(bounds)}: {met}" if bounds else ""
        lines.append(f"{c.name} ({c.unit})")
        names = f"  {c.a} / {c.b}"
        numbers = "".join(f"{m:11.4g}" for m in medians)
        lines.append(f"{names:44}{numbers}{c.ratio:8.3f}  {verdict}".rstrip())
    return "\n".join(lines)


def run(names: Sequence[str], repeats: int, out: str) -> list[Comparison]:
    """Run the named benchmarks (default: all), print, and write them as JSON."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(
            f"there is no benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}"
        )
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    results: list[Comparison] = []
    for name in names or NAMES:
        print(f"{name} ...", flush=True)
        found = importlib.import_module(f"{__package__}.{name}").compare(repeats)
        print(table(found), flush=True)
        results += found
    text = {
        "machine": machine(),
        "comparisons": [asdict(c) | {"ratio": c.ratio, "met": c.met} for c in results],
    }
    path.write_text(json.dumps(text, indent=1))
    return results
