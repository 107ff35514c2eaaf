"""The course kit: what answers earn, and that no answer harms another or its grader."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nasty import some

from minizero.lab.course import __main__ as command
from minizero.lab.course import build, drivers, exercise, grade, reader
from minizero.lab.course.exercise import Exercise, every
from minizero.lab.course.grade import Grader
from minizero.lab.course.sandbox import ENDED, RAISES, Limits, Sandbox

ROOT = Path(__file__).resolve().parent.parent
EASY = every()["ex-zero3-1"]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader("a course") as grader:
        yield grader
    assert not grader._boxes.queue[0]._folder.exists()


@pytest.fixture(scope="module")
def box(grader: Grader) -> Sandbox:
    """The grader's one: to start another takes seconds."""
    return grader._boxes.queue[0]


def printed(asked: Exercise) -> str:
    """An answer that returns what the chapter prints, whatever it is asked."""
    names: dict[str, Any] = {"answer": exercise.define(asked.reference, asked.answer)}
    if asked.run is Exercise.run:
        value = names["answer"](**asked.book)
        return f"def {asked.answer}(*args, **how):\n    return {value!r}\n"
    return asked.starter


MEASURES = [pytest.mark.thorough]  # what trains, starts ranks, or is not of these
ASKED = ("ex-memory-1", "ex-ranks-1", "ex-overlap-1", "ex-scale-1")
ALL = "MINIZERO_COURSE_ALL" in os.environ
"""All exercises on ranks, a quarter of an hour; else one a chapter but the capstone."""


def tried() -> Iterator[Exercise]:
    on_ranks = {"ex-capstone"}
    for asked in every().values():
        subject = asked.label.rpartition("-")[0]
        if ALL or not asked.on_ranks or subject not in on_ranks:
            yield asked
        if asked.on_ranks:
            on_ranks.add(subject)


def is_measured(asked: Exercise) -> bool:
    return asked.run is not Exercise.run or asked.label not in ASKED


PARAMETERS = [
    pytest.param(each, marks=MEASURES[: is_measured(each)], id=each.label)
    for each in tried()
]


@pytest.mark.parametrize("asked", PARAMETERS)
def test_what_answers_earn(asked: Exercise, grader: Grader) -> None:
    """References earn all, starters nothing, wrong answers less, and are named."""
    assert len(asked.wrong) >= 2 + asked.on_ranks
    cases = asked.cases(grader.seed, "ada")

    def right(text: str) -> Iterator[bool]:
        """On ranks case by case, since the first that is not right may be enough."""
        at_once = 1 if asked.on_ranks else len(cases)
        for i in range(0, len(cases), at_once):
            some = cases[i : i + at_once]
            expected = grader.trusted(asked, asked.reference, some)
            yield from map(exercise.equal, grader.trusted(asked, text, some), expected)

    full = grader.grade(asked, "ada", asked.reference)
    assert full.points == asked.points, full.remark
    assert not any(right(asked.starter))
    assert not asked.book or not any(right(printed(asked)))
    for wrong in asked.wrong:
        text = asked.planted(wrong)
        first = next(
            (c for c, ok in zip(cases, right(text), strict=True) if not ok), {}
        )
        assert first, f"{wrong.name} is right"
        assert wrong.name != "unsharded" or not any(right(text))

        def observed(text: str, case: exercise.Case = first) -> Any:
            return grader.trusted(asked, text, [case])[0]

        seen, expected = observed(text), observed(asked.reference)
        named = exercise.likely(asked, seen, expected, observed)
        assert named == wrong, (wrong.name, seen)


def test_every_exercise_is_in_its_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of what is graded; a label that has gone from its chapter fails."""
    rubrics = (exercise.SOURCES / "rubrics.md").read_text()
    for chapter in exercise.chapters():
        gone = {e.label for e in exercise.load(chapter)} - {*exercise.labels(chapter)}
        assert not gone, f"{chapter} has these exercises no more: {gone}"
        assert exercise.load(chapter), chapter
        for label in exercise.labels(chapter):
            assert label in every() or f"`{label}`" in rubrics, label
            stated = exercise.statement(label)
            assert stated.hint and stated.minutes and "solution-" not in stated.text
            for text in (stated.text, stated.hint):  # what leads nowhere, away from it
                assert not re.search(r"\[\^|\]\((?!http)|\d{4}[a-z]|\{\w+\}`", text)
    with capsys.disabled():
        print("\n" + command.listing())


def test_cases_are_drawn_for_a_student() -> None:
    for asked in every().values():
        assert asked.cases("s", "ada") == asked.cases("s", "ada")
        drawn = [json.dumps(asked.cases("s", f"student {i}")) for i in range(6)]
        assert len(set(drawn)) > 2, asked.label


def test_a_test_looks_at_its_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    """A student's test that counts which subject it was given is none."""
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(0))
    seen = []

    def make(mutant: str) -> Any:
        return type("Subject", (), {"answer": 41 if mutant else 42})

    def by_order(kind: type) -> None:
        seen.append(kind)
        assert len(seen) % 2

    def by_result(kind: Any) -> None:
        assert kind.answer == 42

    counted, looked = (drivers.kills(0, t, make, "41") for t in (by_order, by_result))
    assert not any(counted.values()) and all(looked.values())


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=MEASURES)])
def test_starters_and_public_checks_run_from_imports_alone(slow: bool) -> None:
    for asked in every().values():
        if bool(asked.needs) != slow:
            continue
        names: dict[str, Any] = {"__name__": "__main__"}
        for text in (asked.starter, asked.reference):
            exec(text, names)
            assert asked.answer in names
        if not asked.on_ranks:
            exec(asked.public, names)  # of the reference


HOSTILE = {
    "hangs": "while True: pass",
    "raises": "raise RuntimeError('on import')",
    "forks": "import os\nwhile True: os.fork()",
    "prints a gigabyte": "while True: print('x' * 1_000_000)",
    "fills memory": "import torch\nkept = [torch.ones(10**8) for _ in range(200)]",
    "fills the disk": "for i in range(99): open(f'{i}', 'wb').write(bytes(10**7))",
    "leaves a process": (
        "import subprocess, sys\nfor _ in range(3): subprocess.Popen([sys.executable,"
        " '-c', 'import time; time.sleep(999)'], start_new_session=True)"
    ),
    "edits the tests": (
        "import minizero.lab.course.exercise as e\nimport os\n"
        "e.equal = lambda *a: True\n"
        "for path in (e.__file__, str(e.SOURCES / '05_zero1.py'), e.ROOT / 'left'):\n"
        "    open(path, 'a').write('# edited')"
    ),
    "writes its own result": (
        "import os\nopen('result.jsonl', 'w').write('true\\n' * 9)\nos._exit(0)"
    ),
    "reads the reference": (
        "import gc, sys\nfrom minizero.lab.course import exercise\n"
        "known = exercise.every()\n"
        "found = [o for o in gc.get_objects() if isinstance(o, exercise.Exercise)]\n"
        "exec((known.get('ex-zero3-1') or found[0]).reference)"
    ),
    "replaces what measures it": (
        "import minizero.lab.course.sandbox, builtins, torch\n"
        "torch.equal = builtins.all = lambda *a: True\n" + EASY.reference
    ),
    "hides its files": (
        "import os\nfor _ in range(3000): os.mkdir('a' * 200); os.chdir('a' * 200)"
    ),
    "fills files without a name": (
        "import os, time\nfiles = [os.memfd_create('x') for _ in range(50)]\n"
        "for file in files: os.write(file, bytes(4_000_000))\ntime.sleep(99)"
    ),
    "closes a folder": "import os\nos.makedirs('a/b'); os.chmod('a', 0); os._exit(0)",
    "ends its grader": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
}
TOLD = {"replaces what measures it": "replaces", "fills files without a name": "MB"}
LANDLOCK = {"edits the tests", "reads the reference", "ends its grader"}
FEW = ("hangs", "forks", "fills memory", "reads the reference")


@pytest.mark.parametrize("what", some(HOSTILE, lambda what: what not in FEW))
def test_an_answer_harms_nobody(
    what: str, box: Sandbox, confined: bool, request: pytest.FixtureRequest
) -> None:
    """Once, and five times if everything is tested."""
    if what in LANDLOCK and not confined:
        pytest.skip("this system has no Landlock")
    sources = (ROOT / "book" / "course").glob("*.py")
    before = {path: path.read_bytes() for path in sources}
    cases = EASY.cases("seed", "ada")
    right = box.run(EASY, EASY.reference, cases)
    seconds = 0.5 if what == "hangs" else 9  # others exceed another limit first
    limits = Limits(seconds, memory=1 << 30, processes=12, disk=8 << 20)
    for _ in range(5 if request.config.getoption("--all") else 1):
        seen = box.run(EASY, HOSTILE[what], cases, limits)
        assert len(seen) == len(cases)
        assert not any(map(exercise.equal, seen, right)), seen
        assert TOLD.get(what, "") in str(seen[0])
    assert box.run(EASY, EASY.reference, cases) == right
    assert box._process and not list(box._folder.iterdir())
    assert not psutil.Process(box._process.pid).children(recursive=True)
    assert before == {path: path.read_bytes() for path in before}
    assert not (ROOT / "left").exists()


@pytest.mark.thorough
def test_the_class_goes_on_when_the_process_that_runs_answers_is_ended(
    box: Sandbox,
) -> None:
    cases = EASY.cases("seed", "ada")
    right = box.run(EASY, EASY.reference, cases)
    assert box._process
    box._process.kill()
    how = {ENDED: "the process that ran it was ended"}
    assert box.run(EASY, EASY.reference, cases) == [how] * len(cases)
    assert box.run(EASY, EASY.reference, cases) == right


def test_nothing_is_graded_where_the_reference_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that hangs as the reference does is not right."""
    grader, late = Grader("seed"), {ENDED: "late"}
    monkeypatch.setattr(grader, "run", lambda _, text, cases: [late] * len(cases))
    with pytest.raises(RuntimeError, match="ex-zero3-1 does not run: late"):
        grader.grade(EASY, "ada", "while True: pass")


def test_where_answers_are_not_confined_a_teacher_must_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "landlock", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["course", "grade", str(tmp_path), "--out", "x"])
    with pytest.raises(SystemExit, match="add --trusting"):
        command.main()


@pytest.fixture(scope="module")
def confined(box: Sandbox) -> bool:
    """Whether this system can confine a process to folders."""
    text = f"import os\nos.listdir({str(ROOT)!r})\n" + EASY.reference
    return RAISES in box.run(EASY, text, [EASY.book or {}])[0]


def test_a_class_is_graded_and_goes_on_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: Sandbox
) -> None:
    monkeypatch.setattr(grade, "Sandbox", lambda: nullcontext(box))
    folder, out = tmp_path / "class", tmp_path / "grades"
    build.sample(folder)
    (folder / "fay").mkdir()
    (folder / "fay" / "01_memory.ipynb").write_text("not a notebook")
    for name in ("=1+1 \udce9", "gil", "hal"):
        (folder / name).mkdir()
    (folder / "gil" / "01_memory.ipynb").symlink_to(folder / "ada" / "01_memory.ipynb")
    ada = json.loads((folder / "ada" / "01_memory.ipynb").read_text())
    for cell in ada["cells"]:
        cell["source"] = "\r\n" + "\r\n".join("".join(cell["source"]).splitlines())
    ada["cells"] += [{"cell_type": "code", "source": "# ex-memory-1\n'\ud800'"}]
    (folder / "hal" / "01_memory.ipynb").write_text(json.dumps(ada), "utf-8-sig")
    asked = [each for each in exercise.load("01_memory") if each.label.endswith("-1")]
    monkeypatch.setattr(grade, "load", lambda chapter: asked * (chapter == "01_memory"))
    monkeypatch.setattr(type(asked[0]), "seconds", 3)
    class_ = grade.grade(folder, out, "seed")
    points = {student: mine[0].points for student, mine in class_.items() if mine}
    nothing = dict.fromkeys(("cleo", "dan", "eva", "fay", "gil"), 0)
    assert points == {"ada": 4, "ben": 0, "hal": 4} | nothing
    assert "cannot be read" in (out / "fay.md").read_text()
    told = (out / "ben.md").read_text()
    assert "entry 2=" in told and asked[0].wrong[0].thought in told
    assert "starter, unchanged" in (out / "cleo.md").read_text()
    rows = list(csv.DictReader((out / "grades.csv").open()))
    assert [row["points"] for row in rows] == [*"0400000", "0", "4"]
    assert rows[0]["student"] == "'=1+1 ?" and "a link" in (out / "gil.md").read_text()
    assert "such as 01_memory.ipynb" in (out / "=1+1 ?.md").read_text()

    # what is known is not graded again; what was handed in anew is
    monkeypatch.setattr(Grader, "grade", lambda self, *task: 1 / 0)
    assert grade.grade(folder, out, "seed") == class_
    again = folder / "eva" / "01_memory.ipynb"
    again.write_text(again.read_text().replace("does not run", "does"))
    with pytest.raises(ZeroDivisionError):
        grade.grade(folder, out, "seed")
    shutil.rmtree(folder / "eva")
    (out / "records" / "ada" / "ex-memory-1.json").write_text("{")  # a full disk
    with pytest.raises(ZeroDivisionError):
        grade.grade(folder, out, "seed")


def test_a_reader_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "PROGRESS", tmp_path / "progress.json")

    def too_few(parameter: int, gradient: int, state: int) -> int:
        return (parameter + gradient + state) // parameter

    hint = exercise.statement(EASY.label).hint
    assert not reader.check(EASY.label, too_few)
    first = capsys.readouterr().out
    assert EASY.wrong[0].thought in first and hint not in first
    assert not reader.check(EASY.label, None)
    assert hint in capsys.readouterr().out
    assert reader.check(EASY.label, lambda *cost: sum(cost) // cost[0] + 1)
    assert "Right. 1 of" in capsys.readouterr().out
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress == {EASY.label: {"tries": 3, "solved": True}}
    assert not reader.check("ex-zero9-1", too_few)


def solutions() -> Iterator[tuple[str, str]]:
    """Sentences and lines of code that stand in a solution, and nowhere else."""
    outside = ""
    for path in exercise.NOTEBOOKS.glob("[0-9]*.ipynb"):
        notebook = build.without_solutions(nbformat.read(path, as_version=4))
        outside += "\n".join(cell.source for cell in notebook.cells)
    for path in [*(ROOT / "book").glob("*.md"), *(ROOT / "minizero").rglob("*.py")]:
        outside += path.read_text()
    for asked in every().values():  # what a student is given to begin with
        outside += asked.starter + asked.public
    for path in sorted(exercise.NOTEBOOKS.glob("[0-9]*.ipynb")):
        chapter = path.stem
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells)
        for label in exercise.labels(chapter):
            after = text.split(f"{{solution-start}} {label}\n")[1]
            solution = after.split("{solution-end}")[0]
            for line in re.split(r"\n|(?<=[.:;]) ", solution):
                words = line.strip()
                if len(words) > 30 and words not in outside:
                    yield label, words


def assert_no_solution(folder: Path, found: list[tuple[str, str]]) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".ipynb", ".md", ".html", ".js", ".txt", ".py"):
            text = path.read_text(errors="replace")
            if path.suffix == ".ipynb":
                cells = nbformat.reads(text, as_version=4).cells
                text = "\n".join(cell.source for cell in cells)
            assert "{solution" not in text or path.suffix == ".py", path
            for label, words in found:
                assert words not in text, f"{path} has the solution of {label}: {words}"


def test_no_solution_is_given_away(tmp_path: Path) -> None:
    build.build(tmp_path / "course", "seed", pages=False)
    found = list(solutions())
    assert len({label for label, _ in found}) > 60
    for name in ("students", "book"):
        assert_no_solution(tmp_path / "course" / name, found)
    assert not list((tmp_path / "course" / "book").rglob("05_zero1.py"))
    for asked in every().values():
        chapter = exercise.statement(asked.label).chapter
        text = (tmp_path / "course" / "students" / f"{chapter}.ipynb").read_text()
        assert asked.label in text
        given = asked.starter + asked.public + exercise.statement(asked.label).text
        for line in asked.reference.splitlines():
            if len(line) > 30 and "import" not in line and line.strip() not in given:
                assert json.dumps(line)[1:-1] not in text, line
    assert (paths := [*(tmp_path / "course" / "otter").glob("*.ipynb")])
    for path in paths:
        cells = nbformat.read(path, as_version=4).cells
        for cell in cells:
            if cell.cell_type == "code":
                compile(cell.source, path.name, "exec")
    assert len(build.SYLLABI) == len(list((tmp_path / "course").glob("syllabus-*.md")))


@pytest.mark.thorough
def test_gradescope_gives_full_points_to_the_references(tmp_path: Path) -> None:
    build.archive(tmp_path / "it.zip", "it's a seed")
    tests = build.dry_run(tmp_path / "it.zip", ["02_ranks"])
    assert len(tests) == len(exercise.load("02_ranks"))
    assert all(test["score"] == test["max_score"] for test in tests), tests


@pytest.mark.thorough
def test_the_rendered_book_has_no_solution(tmp_path: Path) -> None:
    """Of three chapters: all sources are searched above, and pages take minutes."""
    build.edition(tmp_path / "book")
    chapters = ("01_memory", "05_zero1", "12_checkpoint")
    rows = "".join(f"  - file: notebooks/{each}\n" for each in chapters)
    toc = f"format: jb-book\nroot: book/index\nchapters:\n{rows}"
    (tmp_path / "book" / "_toc.yml").write_text(toc)
    config = tmp_path / "book" / "_config.yml"  # source pages link to all chapters
    text = re.sub(r"source_pages: book, | +- source_pages\n", "", config.read_text())
    config.write_text(text)
    build.render(tmp_path / "book")
    pages = tmp_path / "book" / "_build" / "html"
    for name in (*(f"notebooks/{each}.html" for each in chapters), "searchindex.js"):
        assert (pages / name).exists()
    plain = [
        (label, w) for label, w in solutions() if not re.search(r"[`$*{<>&\"']", w)
    ]
    assert_no_solution(pages, plain)
