"""`check`: an exercise for a reader alone, in the notebook."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from . import exercise
from .exercise import ROOT, define, described, equal, likely, observe, unequal

PROGRESS = Path(os.environ.get("MINIZERO_PROGRESS", ROOT / "runs" / "exercises.json"))
"""How often each exercise was tried, and whether it is solved."""


def check(label: str, answer: Any) -> bool:
    """Say whether an answer is right, or what is wrong; the hint on the second try.

    `answer`: the function or class that the exercise asks for. Nothing protects this
    process from it: it is yours.
    """
    known = exercise.every()
    if label not in known:
        near = get_close_matches(label, known) or known
        print(f"There is no graded exercise {label!r}. There are: {', '.join(near)}.")
        return False
    progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    mine = progress.setdefault(label, {"tries": 0, "solved": False})
    found = complaint(known[label], answer)
    mine["tries"] += 1
    mine["solved"] = mine["solved"] or not found
    PROGRESS.parent.mkdir(parents=True, exist_ok=True)
    PROGRESS.write_text(json.dumps(progress, indent=1) + "\n")
    if found and mine["tries"] > 1:
        found += f"\nHint: {exercise.statement(label).hint}"
    done = sum(each["solved"] for each in progress.values())
    print(found or f"Right. {done} of {len(known)} graded exercises are solved.")
    return not found


def complaint(asked: exercise.Exercise, answer: Any) -> str:
    """What is wrong with an answer; nothing if it is right."""

    def seen_of(text: str) -> exercise.Observation:
        return observe(asked.run, define(text, asked.answer), case)

    for case in asked.cases("reader", "reader"):
        seen, expected = observe(asked.run, answer, case), seen_of(asked.reference)
        if equal(seen, expected):
            continue
        wrong = likely(asked, seen, expected, seen_of)
        thought = f"\n{wrong.thought}" if wrong else ""
        return f"Not yet. With {described(case)}: {unequal(seen, expected)}.{thought}"
    return ""
