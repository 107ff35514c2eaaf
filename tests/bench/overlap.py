"""Chapter 8: exposed communication, and steps predicted by the simulator."""

from __future__ import annotations

from bench.fit import FITTED, PREDICTED, fit, measure, predict
from bench.runner import Comparison


def compare(repeats: int) -> list[Comparison]:
    """Exposed communication with and without; predicted against measured steps."""
    seen = measure(FITTED | PREDICTED, repeats)
    with_, without = (
        [step.exposed for step in seen.steps[f"small, {how}"]]
        for how in ("overlapped", "at once")
    )
    name = "exposed communication of ZeRO-3"
    results = [
        Comparison(name, "s", "overlapped", "at once", with_, without, at_most=1.0)
    ]
    machine = fit(seen)
    for name, run in PREDICTED.items():
        measured = [step.duration for step in seen.steps[name]]
        predicted = [predict(seen, machine, run).duration] * len(measured)
        bounds = {"at_least": 0.85, "at_most": 1.15}
        results.append(
            Comparison(
                f"step time: {name}",
                "s",
                "simulated",
                "measured",
                predicted,
                measured,
                **bounds,
            )  # fmt: skip
        )
    return results
