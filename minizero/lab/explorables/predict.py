"""An explorable: questions that take the reader's answer before they show theirs."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import traitlets

from minizero.lab.explorables.base import STRIPES, Explorable, look, module
from minizero.lab.plots.style import LINES, short

PALETTE = {"you said": look(LINES[1], STRIPES), "it is": look(LINES[0])}

Question = dict[str, Any]


def number(
    ask: str, answer: float, unit: str = "", why: str = "", at: str = ""
) -> Question:
    """A question whose answer is a number in some unit.

    why: a sentence that is shown with the answer. at: the id of the section that gives
    the answer; the page puts the reader's own under its heading.
    """
    return {"ask": ask, "answer": float(answer), "unit": unit, "why": why, "at": at}


def choice(
    ask: str, choices: Sequence[str], answer: str, why: str = "", at: str = ""
) -> Question:
    """A question whose answer is one of some choices."""
    if answer not in choices:
        raise ValueError(f"The answer {answer!r} is none of the choices {choices}.")
    return {
        "ask": ask, "choices": list(choices), "answer": answer, "why": why, "at": at
    }  # fmt: skip


def curve(
    ask: str, xs: Sequence[str], answer: Sequence[float], unit: str = "",
    why: str = "", at: str = "",
) -> Question:  # fmt: skip
    """A question whose answer is a line, which the reader draws.

    xs: what stands under each of its points. answer: the points, none below 0.
    """
    if len(xs) != len(answer):
        raise ValueError(f"There are {len(answer)} points for {len(xs)} places.")
    points = [float(y) for y in answer]
    return {
        "ask": ask, "xs": list(xs), "answer": points, "unit": unit, "why": why, "at": at
    }  # fmt: skip


class Predict(Explorable):
    """Questions; each shows its answer, and how far off the reader was, once answered.

    answers: what the reader answered, by question. A page keeps it in the browser, and
    sends it nowhere.
    """

    kind = "predict"
    _esm = module(kind)

    questions: traitlets.List[Any] = traitlets.List().tag(sync=True)
    answers = traitlets.Dict().tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    def __init__(self, *questions: Question, **controls: Any) -> None:
        super().__init__(**{"questions": list(questions)} | controls)

    def fallback(self) -> str:
        return "".join(
            f"<p>{html.escape(question['ask'])}</p><details><summary>Answer</summary>"
            f"{html.escape(told(question))}</details>"
            for question in self.questions
        )

    def describe(self) -> str:
        return f"{len(self.questions)} questions, to be answered in a browser"


def told(question: Question) -> str:
    """The answer of a question in words."""
    answer, unit = question["answer"], question.get("unit", "")
    if isinstance(answer, list):
        pairs = zip(question["xs"], answer, strict=True)
        answer = ", ".join(f"{x}: {short(y)}" for x, y in pairs)
    elif not isinstance(answer, str):
        answer = short(answer)
    return f"{f'{answer} {unit}'.strip()}. {question['why']}".strip()
