"""What an exercise of the course is, and how an answer to it is judged.

The statement, the hint and the minutes of an exercise stand in its chapter, and are
found there by the exercise's label. A class in `book/course/` adds what grading needs.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "book" / "course"
NOTEBOOKS = ROOT / "notebooks"
BITS = "bits of "
"""Begins an observation that can only be equal or not, such as a digest of weights."""

RAISES, ENDED = "raises", "ended"
"""Where an observation is an exception, or what ended the process before."""

Case = dict[str, Any]
Observation = Any


@dataclass(frozen=True)
class Wrong:
    """A typical wrong answer: the reference with `old` replaced by `new`.

    Where `old` is empty, `new` is the answer's whole text. `thought`: a sentence for
    the student, what was probably thought.
    """

    name: str
    old: str
    new: str
    thought: str


def always_fails(check: str) -> Wrong:
    """A typical wrong answer where a test is asked for: `check` is turned round."""
    inverted = check.replace("assert", "assert not")
    thought = "Your test fails where nothing is wrong."
    return Wrong("always fails", check, inverted, thought)


class Exercise:
    """One graded exercise; subclasses stand in `book/course/`, in order of the chapter.

    A student writes what `answer` names, a function or a class, in one cell that needs
    no other. It is called on cases that are drawn for this student. What `run`
    observes of a case must equal what it observes of the reference; each case that does
    earns its share of the points.
    """

    label: str
    answer: str
    points: int = 4
    starter: str
    """What the student's cell holds at first; it runs."""
    public: str
    """Checks that the student sees, for no points."""
    reference: str
    wrong: tuple[Wrong, ...] = ()
    book: Case | None = None
    """The chapter's own case, whose result is printed there."""
    explain: str = ""
    """What a person looks for in the explanation, if one is asked for."""
    on_ranks = False
    """Whether ranks are started to grade it."""
    needs: tuple[str, ...] = ()
    """Modules that answers import and that take seconds: once, for all of them."""
    seconds: float = 60
    """Time for all cases, on a slow machine; four times as much with ranks."""

    def draw(self, rng: random.Random) -> list[Case]:
        """The hidden cases of one student."""
        raise NotImplementedError

    @staticmethod
    def run(answer: Any, **case: Any) -> Observation:
        """What there is to see of an answer in one case, as JSON can hold it.

        It travels to another process, without this class.
        """
        return answer(**case)

    def cases(self, seed: str, student: str) -> list[Case]:
        """The cases that this course draws for this student, always the same."""
        return self.draw(random.Random(f"{seed}/{student}/{self.label}"))

    def telling(self, draw: Callable[[], Case], number: int) -> list[Case]:
        """Cases of those that `draw` gives that tell all answers apart.

        For answers that are called and compared, `run` as it is here.
        """
        texts = [self.reference, *map(self.planted, self.wrong)]
        answers = [define(text, self.answer) for text in texts]
        found: list[Case] = []
        for _ in range(1000):
            case = draw()
            seen = [observe(self.run, each, case) for each in answers]
            if not any(equal(a, b) for a, b in combinations(seen, 2)):
                found.append(case)
            if len(found) == number:
                return found
        raise ValueError(f"{self.label}: too few cases tell wrong answers apart")

    def planted(self, wrong: Wrong) -> str:
        """The text of a typical wrong answer."""
        if not wrong.old:
            return wrong.new
        if wrong.old not in self.reference:
            raise ValueError(f"{self.label}: {wrong.old!r} is not in the reference")
        return self.reference.replace(wrong.old, wrong.new)


def define(text: str, name: str) -> Any:
    """What a text defines under a name."""
    # as in a notebook, so that it travels to ranks by value
    names: dict[str, Any] = {"__name__": "__main__"}
    file = f"<answer {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec"), names)  # Triton reads a kernel's source
    if name not in names:
        raise NameError(f"the answer defines no {name!r}")
    return names[name]


def observe(run: Callable[..., Observation], answer: Any, case: Case) -> Observation:
    """Run one case; an exception is an observation too."""
    try:
        return json.loads(json.dumps(run(answer, **case)))
    except BaseException as error:  # also SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        return {RAISES: f"{type(error).__name__}: {error}"[:2000]}


def equal(seen: Observation, expected: Observation) -> bool:
    """Whether an observation is right: integers exactly, other numbers to 1/1000."""
    if isinstance(expected, float) and not isinstance(seen, bool):
        is_number = isinstance(seen, int | float)
        return is_number and math.isclose(seen, expected, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(expected, list):
        together = isinstance(seen, list) and len(seen) == len(expected)
        return together and all(map(equal, seen, expected))
    if isinstance(expected, dict):
        together = isinstance(seen, dict) and seen.keys() == expected.keys()
        return together and all(equal(seen[k], expected[k]) for k in expected)
    if isinstance(expected, bool) != isinstance(seen, bool):
        return False
    return bool(seen == expected)


def alike(seen: Observation, wrong: Observation, right: Observation) -> bool:
    """Whether two observations are wrong in the same way."""
    if isinstance(wrong, dict) and isinstance(seen, dict):
        if RAISES in wrong:  # the same error, of whichever ranks and line
            errors = [str(each.get(RAISES)).split("\n")[0] for each in (seen, wrong)]
            seen_, wrong_ = (re.sub(r"ranks?|[\d, ]", "", e)[:60] for e in errors)
            return seen_ == wrong_
        right = right if isinstance(right, dict) else {}
        return seen.keys() == wrong.keys() and all(
            alike(seen[k], wrong[k], right.get(k)) for k in wrong
        )
    if isinstance(right, str) and right.startswith(BITS):
        return (seen == right) == (wrong == right)
    return equal(seen, wrong)


def likely(
    asked: Exercise, seen: Any, right: Any, observed: Callable[[str], Any]
) -> Wrong | None:
    """The typical wrong answer whose text is `observed` as this answer was seen."""
    for wrong in asked.wrong:
        if alike(seen, observed(asked.planted(wrong)), right):
            return wrong
    return None


def described(case: Case) -> str:
    """A case in words."""
    return ", ".join(
        f"{name}={value:.10g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in case.items()
    )


def unequal(seen: Observation, expected: Observation) -> str:
    """Which part of an observation is not right, in words; nothing that is expected."""
    if isinstance(seen, dict) and ENDED in seen:
        return str(seen[ENDED])
    if isinstance(seen, dict) and RAISES in seen:
        said = re.sub(r"<answer [-\d]+>", "your answer", str(seen[RAISES]))
        return "it raises " + said.split("\n")[0].rstrip(".")
    if isinstance(seen, list) and isinstance(expected, list):
        if len(seen) != len(expected):
            return f"this has {len(seen)} entries, and should have {len(expected)}"
        both = (seen, expected)
        seen, expected = ({f"entry {i}": v for i, v in enumerate(b, 1)} for b in both)
    if isinstance(seen, dict) and isinstance(expected, dict):
        parts = {
            k: seen.get(k) for k in expected if not equal(seen.get(k), expected[k])
        }
        return "this is not right: " + ", ".join(
            name if str(value).startswith(BITS) else described({name: value})[:200]
            for name, value in parts.items()
        )
    return f"{seen!r} is not right"


@dataclass(frozen=True)
class Statement:
    """An exercise as its chapter states it."""

    chapter: str
    title: str
    text: str
    hint: str
    minutes: int


@cache
def chapters() -> dict[str, str]:
    """Each notebook's Markdown, code cells being empty lines; and the projects."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        texts = ["".join(c["source"]) * (c["cell_type"] == "markdown") for c in cells]
        found[path.stem] = "\n\n".join(texts)
    return found | {"projects": (SOURCES / "projects.md").read_text()}


def labels(chapter: str) -> list[str]:
    """The labels of a chapter's exercises, in its order."""
    return re.findall(r"\{exercise\}.*\n:label: (\S+)", chapters()[chapter])


@cache
def statement(label: str) -> Statement:
    """Find an exercise in its chapter.

    Raises:
        KeyError: no chapter has this label.
    """
    opened = r"^(?P<fence>[`:]{3,})\{exercise\} *(?P<title>[^\n]*)\n"
    body = rf":label: {label}\n(?P<body>.*?)^(?P=fence)$(?P<after>.*)"
    for name, text in chapters().items():
        if found := re.search(opened + body, text, re.M | re.S):
            chapter = name
            break
    else:
        raise KeyError(f"no chapter has an exercise {label}")
    after = found["after"].split("{solution-start}")[0]
    hints = (
        r"^(?P<fence>[`:]{3,})\{(?:hint|admonition)\}.*?\n\n?(?P<hint>.*?)^(?P=fence)$"
    )
    hint = re.search(hints, found["body"] + after, re.M | re.S)
    text = re.sub(hints, "", found["body"], flags=re.M | re.S).strip()
    minutes = re.search(r"(\d+) minutes", text)
    if hint is None or minutes is None:
        raise ValueError(f"{label} has no hint or no minutes")
    clean = re.sub(r"^:class:.*\n+", "", hint["hint"], flags=re.M).strip()
    return Statement(chapter, found["title"], bare(text), bare(clean), int(minutes[1]))


def bare(text: str) -> str:
    """A text away from its chapter: without citations, footnotes, roles and links."""
    text = re.sub(r" *\{cite[:\w]*\}`[^`]*`| *\[\^\w+\]", "", text)
    text = re.sub(r"\{(?:ref|doc)\}`([^`]*)`", r"\1", text)
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)


@cache
def load(chapter: str) -> tuple[Exercise, ...]:
    """The graded exercises of a chapter; none where it has no source."""
    path = SOURCES / f"{chapter}.py"
    if not path.exists():
        return ()
    # not among sys.modules, so that functions travel by value
    spec = importlib.util.spec_from_file_location(f"course_{chapter}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == spec.name
    ]
    return tuple(kind() for kind in kinds if issubclass(kind, Exercise))


def every() -> dict[str, Exercise]:
    """All graded exercises by label, in the order of the book."""
    return {e.label: e for chapter in chapters() for e in load(chapter)}
