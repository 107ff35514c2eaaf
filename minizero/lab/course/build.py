"""Builds what a course is given: notebooks, a book without solutions, a zip.

Everything goes into one folder, `_build/course` as a rule, and is made from the
chapters and from `book/course/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

from .exercise import (
    NOTEBOOKS,
    ROOT,
    SOURCES,
    Exercise,
    chapters,
    labels,
    load,
    statement,
)
from .grade import EXPLANATION
from .syllabus import SYLLABI, syllabus

NEEDED = """
torch cloudpickle pydantic annotated-types safetensors zlib-ng numpy psutil triton
transformers accelerate
"""


def build(out: Path, seed: str, pages: bool = True) -> None:
    """Build everything; `pages`: also render the book without solutions, as HTML."""
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("students", "otter"):
        (out / folder).mkdir(parents=True)
    for chapter in chapters():
        if load(chapter):
            write(student_notebook(chapter), out / "students" / f"{chapter}.ipynb")
            write(otter_notebook(chapter), out / "otter" / f"{chapter}.ipynb")
    for name in SYLLABI:
        (out / f"syllabus-{name}.md").write_text(syllabus(name))
    graded = [each for chapter in chapters() for each in load(chapter)]
    rows = [f"- `{each.label}`: {each.explain}" for each in graded if each.explain]
    rubrics = (SOURCES / "rubrics.md").read_text() + "\n".join(rows) + "\n"
    (out / "rubrics.md").write_text(rubrics)
    sample(out / "sample")
    edition(out / "book")
    archive(out / "gradescope.zip", seed)
    if pages:
        render(out / "book")


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def write(notebook: Any, path: Path) -> None:
    notebook.metadata.setdefault("kernelspec", KERNEL)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # the same at each build
    nbformat.write(notebook, path)


def asked_in(chapter: str) -> list[tuple[str, Exercise | None]]:
    """The chapter's exercises, each with what grades it, if something does."""
    graded = {each.label: each for each in load(chapter)}
    return [(label, graded.get(label)) for label in labels(chapter)]


def heading(label: str, points: int) -> str:
    """An exercise as a student's notebook states it."""
    asked = statement(label)
    worth = f"{points} points" if points else "read by a person"
    return (
        f"## {asked.title}\n\n`{label}`, {worth}, {asked.minutes} minutes\n\n"
        f"{asked.text}\n\n<details><summary>Hint</summary>\n\n{asked.hint}\n\n</details>"
    )


def explanation(label: str) -> Any:
    return new_markdown_cell(f"{EXPLANATION} of {label}, below this line:\n\n")


def opening(chapter: str) -> Any:
    title = re.search(r"^# (.*)", chapters()[chapter], re.M)
    return new_markdown_cell(
        f"# Exercises: {title[1] if title else chapter}\n\n"
        f"Hand in this notebook under its name, `{chapter}.ipynb`. An answer is the "
        "cell whose first line names its exercise: keep that line. All that an answer "
        "needs, imports too, stands in its cell, since each is graded in a process of "
        "its own. The cell below an answer has checks that you can run; they earn "
        "nothing. What is graded are other cases, drawn for you."
    )


def student_notebook(chapter: str) -> Any:
    """The exercises of a chapter with starters and public checks, and no solution."""
    cells = [opening(chapter)]
    for label, asked in asked_in(chapter):
        cells.append(new_markdown_cell(heading(label, asked.points if asked else 0)))
        if asked:
            starter = f"# {label}\n{asked.starter.strip()}"
            cells.append(new_code_cell(starter, metadata={"exercise": label}))
            cells.append(new_code_cell(asked.public.strip()))
        if not asked or asked.explain:
            cells.append(explanation(label))
    return new_notebook(cells=cells)


HIDDEN = """import contextlib, io
from minizero.lab.course.exercise import every
from minizero.lab.course.reader import complaint
with contextlib.redirect_stdout(io.StringIO()):  # to otter all output is a failure
    wrong = complaint(every()["{label}"], {answer})
assert not wrong, wrong"""


def otter_notebook(chapter: str) -> Any:
    """The same with solutions, as `otter assign` of otter-grader reads it."""

    def block(kind: str, *inside: Any, config: str = "") -> list[Any]:
        begin, end = new_raw_cell(f"# BEGIN {kind}{config}"), f"# END {kind}"
        return [begin, *inside, new_raw_cell(end)]

    def test(points: int, text: str) -> Any:
        """For no points it is shown to students."""
        config = f"points: {points}\nhidden: {bool(points)}".lower()
        head = f'""" # BEGIN TEST CONFIG\n{config}\n""" # END TEST CONFIG\n'
        return new_code_cell(head + text.strip())

    config = f"# ASSIGNMENT CONFIG\nname: {chapter}\nexport_cell: false"
    cells = [new_raw_cell(config), opening(chapter)]
    for label, asked in asked_in(chapter):
        name = label.replace("-", "_")
        if asked:
            starter = asked.starter.strip().replace('"""', "'''")  # it is in quotes
            answer = new_code_cell(
                f'# {label}\n""" # BEGIN PROMPT\n{starter}\n'
                f'""" # END PROMPT\n# BEGIN SOLUTION NO PROMPT\n'
                f"{asked.reference.strip()}\n# END SOLUTION"
            )
            hidden = HIDDEN.format(label=label, answer=asked.answer)
            cells += block(
                "QUESTION",
                new_markdown_cell(heading(label, asked.points)),
                *block("SOLUTION", answer),
                *block("TESTS", test(0, asked.public), test(asked.points, hidden)),
                config=f"\nname: {name}\npoints: {asked.points}",
            )
        if not asked or asked.explain:
            points, told = (2, asked.explain) if asked else (4, "See the rubric.")
            title = f"### Explain `{label}`" if asked else heading(label, 0)
            cells += block(
                "QUESTION",
                new_markdown_cell(title),
                *block("PROMPT", explanation(label)),
                *block("SOLUTION", new_markdown_cell(told)),
                config=f"\nname: {name}_why\npoints: {points}\nmanual: true",
            )
    return new_notebook(cells=cells)


DIRECTIVE = r"^(?P<f{0}>[`:]{{3,}})\{{solution-{0}\}}[^\n]*\n(?::[^\n]*\n)*(?P=f{0})$"
SOLUTION = DIRECTIVE.format("start") + ".*?" + DIRECTIVE.format("end")


def without_solutions(notebook: Any) -> Any:
    """A chapter's notebook without what stands between a solution's start and end."""
    cells, notebook.cells = notebook.cells, []
    sources = [c.source if c.cell_type == "markdown" else "code" for c in cells]
    text = "".join(f"\0{i}\0\n{source}\n" for i, source in enumerate(sources))
    text = re.sub(SOLUTION, "", text, flags=re.M | re.S)
    if "{solution-" in text:
        raise ValueError("a solution has a start and no end")
    for i, rest in re.findall(r"\0(\d+)\0([^\0]*)", text):
        cell = cells[int(i)]
        if cell.cell_type == "markdown":
            cell.source = rest.strip()
        if rest.strip():
            notebook.cells.append(cell)
    return notebook


def edition(out: Path) -> None:
    """The sources of the book without any solution."""
    skip = shutil.ignore_patterns("__pycache__", SOURCES.name, "_modidx.py")
    for name in ("book", "minizero"):
        shutil.copytree(
            ROOT / name, out / name, ignore=skip if name == "book" else None
        )
    example = re.compile(r"^(`{3,})\{solution\}.*?^\1$", re.M | re.S)
    for path in (out / "book").glob("*.md"):
        path.write_text(example.sub("", path.read_text()))
    for path in (ROOT / "_config.yml", ROOT / "_toc.yml"):
        shutil.copy(path, out)
    (out / "notebooks").mkdir()
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        notebook = without_solutions(nbformat.read(path, as_version=4))
        nbformat.write(notebook, out / "notebooks" / path.name)


def render(book: Path) -> None:
    """The pages of an edition, in its folder `_build/html`."""
    tool = str(Path(sys.executable).with_name("jupyter-book"))
    command = [tool, "build", "--quiet", "--all", str(book)]
    subprocess.run(command, check=True, cwd=book.parent)


SETUP = """#!/bin/bash
# Run once, when Gradescope builds the image.
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/env
/autograder/env/bin/pip install --requirement /autograder/source/requirements.txt
"""
RUN = """#!/bin/bash
# Run for each submission; AUTOGRADER and PYTHON are set by a dry run only.
cd "${{AUTOGRADER:-/autograder}}/source"
export PYTHONPATH=$PWD
exec "${{PYTHON:-/autograder/env/bin/python}}" -m minizero.lab.course \\
  gradescope "${{AUTOGRADER:-/autograder}}" --seed '{seed}'
"""


def archive(path: Path, seed: str) -> None:
    """Gradescope's zip: the package, the exercises, the chapters' statements."""
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    needed = [line for line in pinned if line.split("==")[0] in NEEDED.split()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:

        def add(name: str, text: str, mode: int = 0o644) -> None:
            info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            file.writestr(info, text)

        add("setup.sh", SETUP, 0o755)
        add("run_autograder", RUN.format(seed=seed.replace("'", "")), 0o755)
        add("requirements.txt", "\n".join(needed) + "\n")
        for folder in (ROOT / "minizero", SOURCES):
            for each in sorted(folder.rglob("*")):
                if each.is_file() and "__pycache__" not in each.parts:
                    file.write(each, each.relative_to(ROOT))
        for each in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            notebook = nbformat.read(each, as_version=4)
            notebook.cells = [c for c in notebook.cells if c.cell_type == "markdown"]
            add(f"notebooks/{each.name}", nbformat.writes(notebook))


def handed_in(chapter: str, text: Callable[[Exercise], str]) -> Any:
    """A student's notebook in which each answer is `text` of its exercise."""
    notebook = student_notebook(chapter)
    graded = {asked.label: asked for asked in load(chapter)}
    for cell in notebook.cells:
        if label := cell.metadata.get("exercise"):
            cell.source = f"# {label}\n{text(graded[label]).strip()}"
    return notebook


def dry_run(path: Path, chapter_names: Iterable[str]) -> list[dict[str, Any]]:
    """Run the zip as Gradescope does, on reference answers; its tests with scores.

    `setup.sh` is left out: this Python is used.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with zipfile.ZipFile(path) as file:
            file.extractall(root / "source")
        (root / "submission").mkdir()
        for chapter in chapter_names:
            notebook = handed_in(chapter, lambda asked: asked.reference)
            write(notebook, root / "submission" / f"{chapter}.ipynb")
        start = root / "source" / "run_autograder"
        start.chmod(0o755)
        told = {**os.environ, "AUTOGRADER": name, "PYTHON": sys.executable}
        subprocess.run([str(start)], check=True, env=told, cwd=root)
        found = json.loads((root / "results" / "results.json").read_text())
        return list(found["tests"])


def sample(folder: Path) -> None:
    """Five submissions of the first chapter that is graded: what a class hands in."""
    chapter = next(name for name in chapters() if load(name))

    def hangs(asked: Exercise) -> str:
        return "while True:\n    pass" if asked is load(chapter)[0] else asked.reference

    class_: dict[str, Callable[[Exercise], str]] = {
        "ada": lambda asked: asked.reference,
        "ben": lambda asked: asked.planted(asked.wrong[0]),
        "cleo": lambda asked: asked.starter,
        "dan": hangs,
        "eva": lambda asked: "raise RuntimeError('does not run')",
    }
    for student, text in class_.items():
        (folder / student).mkdir(parents=True, exist_ok=True)
        write(handed_in(chapter, text), folder / student / f"{chapter}.ipynb")
