"""An explorable: measured runs, published and our own, beside what is predicted."""

from __future__ import annotations

from functools import cache
from typing import Any

import traitlets

from minizero.lab.explorables.base import Explorable, look, module, table
from minizero.lab.plots.style import LINES, short
from minizero.lab.recorded import SHEET, planner_runs
from minizero.scale.published import Row, mean_error, rows
from minizero.scale.shapes import MODELS

PALETTE = {"measured": look(LINES[3]), "predicted": look(LINES[0])}
OURS = f"our {SHEET.name}"


def title(row: Row) -> str:
    """What tells a run from the others of its model and machine."""
    more = [", fp8"] * (row.precision == "fp8")
    more += [", recomputed"] * (row.checkpointing == "full")
    return f"{row.gpus} GPUs, {row.micro_batch} x {row.sequence:,}{''.join(more)}"


@cache
def runs() -> dict[str, dict[str, list[Any]]]:
    """By machine and model: title, tokens a second and GPU measured, and predicted."""
    table: dict[str, dict[str, list[Any]]] = {}
    for row in sorted(rows(), key=lambda row: (MODELS[row.model].parameters, row.gpus)):
        predicted = row.predict().tokens_per_second_per_gpu
        models = table.setdefault(row.machine, {})
        models.setdefault(row.model, []).append(
            [title(row), row.published, round(predicted, 1)]
        )
    own = [
        [name, round(seen, 1), round(guess, 1)] for name, seen, guess in planner_runs()
    ]
    return dict(sorted(table.items())) | ({OURS: {"toy GPT": own}} if own else {})


class Published(Explorable):
    """Tokens a second and GPU of measured runs, and the prediction of each.

    machine, model: as in `published.csv`, and those of `minizero.lab.recorded`;
        not every model ran on every machine.
    """

    kind = "published"
    _esm = module(kind)

    machine = traitlets.Enum(list(runs()), "h100-80gb").tag(sync=True)
    model = traitlets.Enum(
        list(dict.fromkeys(name for models in runs().values() for name in models)),
        "mpt-7b",
    ).tag(sync=True)
    runs = traitlets.Dict().tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    @traitlets.default("runs")
    def _runs(self) -> dict[str, Any]:
        return runs()

    def numbers(self) -> list[list[Any]]:
        """By run: tokens a second and GPU, measured and predicted."""
        found: list[list[Any]] = self.runs[self.machine].get(self.model, [])
        return found

    def fallback(self) -> str:
        texts = {name: f"{a:,.0f} and {b:,.0f}" for name, a, b in self.numbers()}
        return table(self.describe(), ("run", "measured and predicted"), texts)

    def describe(self) -> str:
        errors = [b / a - 1 for _, a, b in self.numbers()]
        if not errors:
            return f"No run of {self.model} on {self.machine} was measured."
        return (
            f"{self.model} on {self.machine}: {len(errors)} runs, the mean error of "
            f"the prediction is {short(100 * mean_error(errors))} %."
        )
