"""Grades a folder of submissions: a table of the class, and a page for each student.

A submission is a folder with the student's name, and in it the student's notebooks:
`submissions/ada/05_zero1.ipynb`. An answer is a cell whose first line names its
exercise.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from .exercise import (
    ENDED,
    RAISES,
    SOURCES,
    Case,
    Exercise,
    chapters,
    described,
    equal,
    likely,
    load,
    statement,
    unequal,
)
from .sandbox import Sandbox

MARK = re.compile(r"\s*#+ *(ex-[\w-]+)")
EXPLANATION = "**Your explanation**"
NO_FILE = "No file has the name of a chapter's notebook, such as 01_memory.ipynb."
MOST = 100_000  # characters of an answer that are read


@dataclass
class Record:
    """What one answer has earned, and why not more."""

    label: str
    points: float
    most: int
    remark: str
    explanation: str = ""
    key: str = ""
    """Of the answer and its exercise: a record with this key need not be made again."""


class Grader:
    """Compares answers with references, each in a process of its own."""

    def __init__(self, seed: str, jobs: int = 1) -> None:
        self.seed, self.jobs = seed, jobs
        self._boxes: Queue[Sandbox] = Queue()
        self._known: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Grader:
        for _ in range(self.jobs):
            self._boxes.put(self._stack.enter_context(Sandbox()))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, asked: Exercise, text: str, cases: list[Case]) -> list[Any]:
        """What is observed of an answer, in a process of its own."""
        box = self._boxes.get()
        try:
            return box.run(asked, text, cases)
        finally:
            self._boxes.put(box)

    def trusted(self, asked: Exercise, text: str, cases: list[Case]) -> list[Any]:
        """As `run`, once for all students who have the same cases."""
        keys = [json.dumps([asked.label, text, case]) for case in cases]
        new = {k: c for k, c in zip(keys, cases, strict=True) if k not in self._known}
        if new:
            seen = self.run(asked, text, list(new.values()))
            self._known |= dict(zip(new, seen, strict=True))
        return [self._known[key] for key in keys]

    def grade(
        self, asked: Exercise, student: str, text: str | None, fault: str = ""
    ) -> Record:
        """Grade one answer; None where there is none, perhaps because of a fault."""
        record = partial(Record, asked.label, most=asked.points)
        if text is None:
            return record(0, remark=fault or "There is no answer.")
        if text.strip() == f"# {asked.label}\n{asked.starter.strip()}":
            return record(0, remark="This is the starter, unchanged.")
        cases = asked.cases(self.seed, student)
        seen = self.run(asked, text, cases)
        expected = self.trusted(asked, asked.reference, cases)
        for each in expected:
            if isinstance(each, dict) and {RAISES, ENDED} & each.keys():
                fault = f"the reference of {asked.label} does not run: "
                raise RuntimeError(fault + unequal(each, None))
        right = list(map(equal, seen, expected))
        points = round(asked.points * sum(right) / len(cases), 2)
        if all(right):
            return record(points, remark="Right.")
        i = right.index(False)
        case, fault = described(cases[i])[:500], unequal(seen[i], expected[i])[:800]
        some = f"{sum(right)} of {len(cases)} cases are right. " if any(right) else ""
        remark = f"{some}With {case}: {fault}."

        def observed(text: str) -> Any:
            return self.trusted(asked, text, [cases[i]])[0]

        if wrong := likely(asked, seen[i], expected[i], observed):
            remark += f"\n\n{wrong.thought}"
        return record(points, remark=remark)


def plain(text: str) -> str:
    """A text that every file can hold, with one kind of line end."""
    return re.sub(r"\r\n?", "\n", text).encode(errors="replace").decode()


def answers(path: Path) -> tuple[dict[str, str], dict[str, str], str]:
    """Answers and explanations in a student's notebook, by label; why it has none."""
    found: dict[str, str] = {}
    explained: dict[str, str] = {}
    try:
        if path.is_symlink():
            raise ValueError("it is a link, perhaps to another's answers")
        cells = json.loads(path.read_bytes())["cells"]
        texts = [(c["cell_type"], plain("".join(c["source"]))) for c in cells]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return {}, {}, f"{path.name} cannot be read as a notebook: {error!r}."
    for kind, source in texts:
        if kind == "code" and (mark := MARK.match(source)):
            label = mark[1]
            found[label] = (found.get(label, "") + source + "\n")[:MOST]
        elif kind == "markdown" and EXPLANATION in source:
            if label_ := re.search(r"ex-[\w-]+", source):
                body = source.split("\n", 1)[-1].strip()
                explained[label_[0]] = body[:MOST]
    return found, explained, ""


def submitted(folder: Path) -> Iterator[tuple[Exercise, str | None, str, str]]:
    """A student's exercises, answers and explanations; why a notebook has none."""
    for chapter in chapters():
        path = folder / f"{chapter}.ipynb"
        if path.is_file():
            found, explained, fault = answers(path)
            for asked in load(chapter):
                note = explained.get(asked.label, "")
                yield asked, found.get(asked.label), note, fault


def grade(folder: Path, out: Path, seed: str, jobs: int = 1) -> dict[str, list[Record]]:
    """Grade all submissions of a folder, and write what came of it to `out`.

    What was graded before, of the same answer, is not graded again: a run that was
    ended goes on where it was.
    """
    folders = [p for p in sorted(folder.iterdir()) if p.is_dir() and p.name[0] != "."]
    tasks = [(plain(p.name), *each) for p in folders for each in submitted(p)]
    with Grader(seed, jobs) as grader, ThreadPoolExecutor(jobs) as threads:
        records = list(threads.map(partial(_graded, grader, out), tasks))
    class_: dict[str, list[Record]] = {plain(p.name): [] for p in folders}
    for (student, *_), record in zip(tasks, records, strict=True):
        class_[student].append(record)
    write(class_, out)
    return class_


def _graded(grader: Grader, out: Path, task: tuple[Any, ...]) -> Record:
    student, asked, text, note, fault = task
    source = SOURCES / f"{statement(asked.label).chapter}.py"
    name = f"{grader.seed}\0{student}\0{text}\0{fault}".encode() + source.read_bytes()
    key = hashlib.sha256(name).hexdigest()[:16]
    path = out / "records" / student / f"{asked.label}.json"
    with suppress(OSError, ValueError, TypeError):  # none, or half of one
        known = Record(**json.loads(path.read_text()))
        if known.key == key:
            known.explanation = note
            return known
    record = grader.grade(asked, student, text, fault)
    record.key, record.explanation = key, note
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(asdict(record)))
    half.replace(path)
    print(
        f"{student:20} {asked.label:18} {record.points:g} of {record.most}", flush=True
    )
    return record


def write(class_: dict[str, list[Record]], out: Path) -> None:
    """The table of the class, `grades.csv`, and a page a student."""
    out.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(r.label for mine in class_.values() for r in mine))
    with (out / "grades.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["student", *columns, "points", "of"])
        for student, mine in class_.items():
            points = {r.label: f"{r.points:g}" for r in mine}
            every = [points.get(label, "") for label in columns]
            got, of = totals(mine)
            formula = student.startswith(("=", "+", "-", "@", "\t"))  # to a spreadsheet
            table.writerow(["'" * formula + student, *every, f"{got:g}", of])
    for student, mine in class_.items():
        (out / f"{student}.md").write_text(page(student, mine))


def totals(mine: list[Record]) -> tuple[float, int]:
    return round(sum(r.points for r in mine), 2), sum(r.most for r in mine)


def page(student: str, mine: list[Record]) -> str:
    """What a student is told."""
    points, most = totals(mine)
    parts = [f"# {student}\n\n{points:g} of {most} points.\n"]
    parts += [] if mine else [NO_FILE + "\n"]
    for record in mine:
        title = statement(record.label).title
        parts.append(
            f"## {title} (`{record.label}`): {record.points:g} of {record.most}\n\n"
            f"{record.remark}\n"
        )
        if record.explanation:
            quoted = record.explanation.replace("\n", "\n> ")
            parts.append(f"Your explanation, read by a person:\n\n> {quoted}\n")
    return "\n".join(parts)


def gradescope(folder: Path, seed: str) -> None:
    """Grade what Gradescope has put into `folder`, and write its `results.json`."""
    student = "student"
    with suppress(OSError, LookupError):
        told = json.loads((folder / "submission_metadata.json").read_text())
        student = told["users"][0]["email"]
    with Grader(seed) as grader:
        given = list(submitted(folder / "submission"))
        records = [grader.grade(e, student, text, why) for e, text, _, why in given]
    tests = [
        {
            "name": f"{statement(record.label).title} ({record.label})",
            "score": record.points,
            "max_score": record.most,
            "output": record.remark,
        }
        for record in records
    ]
    (folder / "results").mkdir(exist_ok=True)
    result = {"tests": tests} if tests else {"score": 0, "output": NO_FILE}
    (folder / "results" / "results.json").write_text(json.dumps(result, indent=1))
