"""What must agree in two runs of a case, and how closely."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .cases import Config, stage_of

Seen = dict[str, list[Any]]

EXACT = ("skipped", "applied", "counts", "scales")
CLOSE = ("losses", "returned", "norms", "lrs", "moms", "grads", "params")


def flatten(values: Any) -> list[Any]:
    if not isinstance(values, list | tuple):
        return [values]
    return [leaf for value in values for leaf in flatten(value)]


def expected_norms(case: Config, theirs: Seen) -> list[Any]:
    """DeepSpeed's norms, but for what it reports otherwise than it computes."""
    norms = theirs["norms"]
    if case["config"].get("fp16") and stage_of(case) == 3:
        # divided by the scale of the next step, where that has grown
        scales = theirs["scales"]
        grown = [b / a if b > a else 1 for a, b in pairwise(scales)]
        norms = [float(n) * g for n, g in zip(norms, [1, *grown], strict=True)]
    return norms


def tolerance(case: Config) -> float:
    """Relative. fp16 has 11 bits, and stage 3 of DeepSpeed another linear layer."""
    return 2e-3 if case["config"].get("fp16") else 1e-5


def differs(case: Config, ours: Seen, theirs: Seen) -> list[str]:
    """A sentence for each thing that does not agree."""
    found = []
    theirs = {**theirs, "norms": expected_norms(case, theirs)}
    fp16 = "fp16" in case["config"]
    if fp16 and stage_of(case) == 0 and "ours" not in case:
        # its updates are too short by the loss scale, so losses have parted
        theirs = {k: v for k, v in theirs.items() if k not in ("losses", "norms")}
    if "ours" in case:
        theirs.pop("lrs")
    for name in EXACT:
        if ours[name] != theirs[name]:
            found.append(f"{name} are {ours[name]}, not {theirs[name]}")
    for name in CLOSE:
        if name not in theirs or theirs[name][0] is None:
            continue
        a, b = flatten(ours[name]), flatten(theirs[name])
        if len(a) != len(b):
            found.append(f"there are {len(a)} {name}, not {len(b)}")
            continue
        worst = max(range(len(a)), key=lambda i: apart(a[i], b[i]))
        if apart(a[worst], b[worst]) > tolerance(case):
            found.append(f"{name}: {a[worst]}, not {b[worst]}, at {worst}")
    return found


def apart(a: Any, b: Any) -> float:
    """Their difference, relative where they are not small."""
    a, b = float(a), float(b)
    return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-3)


def farthest(case: Config, ours: Seen, theirs: Seen, name: str) -> float | None:
    """For the table: how far apart the two are."""
    values = expected_norms(case, theirs) if name == "norms" else theirs[name]
    if values[0] is None:
        return None
    pairs = zip(flatten(ours[name]), flatten(values), strict=True)
    return max(apart(a, b) for a, b in pairs)


def rounded(seen: Any) -> Any:
    """For the record: nine digits, and one value for what is always the same."""
    if isinstance(seen, dict):
        short = {name: rounded(values) for name, values in seen.items()}
        return {
            name: {"always": values[0]} if same(values) else values
            for name, values in short.items()
        }
    if isinstance(seen, list):
        return [rounded(value) for value in seen]
    if not isinstance(seen, float):
        return seen
    return float(f"{seen:.9g}") if abs(seen) < float("inf") else str(seen)


def same(values: list[Any]) -> bool:
    return len(values) > 2 and all(value == values[0] for value in values)


def unrounded(record: dict[str, Any], case: Config) -> Seen:
    """The inverse, but for the digits."""
    steps = case["steps"]
    turns = case["config"]["gradient_accumulation_steps"] + case.get("held", 0)
    return {
        name: [values["always"]] * steps * (turns if name == "returned" else 1)
        if isinstance(values, dict)
        else values
        for name, values in record.items()
    }
