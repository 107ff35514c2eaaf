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


def tolerance(case: Config, name: str, index: int) -> float:
    """Relative. fp16 has 11 bits, and stage 3 of DeepSpeed another linear layer.

    bf16 has 8 bits, and a step of its numbers is up to 2**-7. The first loss is made of
    equal weights; on one machine it is equal bit for bit, but for that layer. Then
    sums in another order move some master weight, in its last bit, over the edge
    between two neighbours in bf16, and what follows is apart by such steps.
    """
    if case["config"].get("bf16"):
        first = name == "losses" and index == 0
        return 1e-3 if first else 2 * 2**-7
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
        excess = [
            apart(x, y) / tolerance(case, name, i)
            for i, (x, y) in enumerate(zip(a, b, strict=True))
        ]
        worst = excess.index(max(excess))
        if excess[worst] > 1:
            found.append(f"{name}: {a[worst]}, not {b[worst]}, at {worst}")
    return found


def apart(a: Any, b: Any) -> float:
    """Their difference, relative where they are not small."""
    a, b = float(a), float(b)
    return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-3)


def rounded(seen: Any) -> Any:
    """For the record: nine digits."""
    if isinstance(seen, dict):
        return {name: rounded(values) for name, values in seen.items()}
    if isinstance(seen, list):
        return [rounded(value) for value in seen]
    return float(f"{seen:.9g}") if isinstance(seen, float) else seen
