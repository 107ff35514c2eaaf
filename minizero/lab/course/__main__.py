"""The course from the command line: `python -m minizero.lab.course`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .exercise import ROOT, chapters, labels, load
from .grade import grade, gradescope, totals
from .sandbox import landlock

OUT = ROOT / "_build"
OPEN = """This system has no Landlock (Linux 5.13 or later), so an answer can read the
exercises' references, and write where you can."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minizero.lab.course")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="notebooks, book, zip, syllabi")
    make.add_argument("--no-pages", action="store_true", help="do not render the book")
    marks = commands.add_parser("grade", help="a folder with a folder for each student")
    marks.add_argument("submissions", type=Path)
    marks.add_argument("--jobs", type=int, default=1, help="answers at a time")
    marks.add_argument("--trusting", action="store_true", help="without Landlock, too")
    upload = commands.add_parser("gradescope", help="what Gradescope's zip runs")
    upload.add_argument("folder", type=Path)
    for each in (make, marks, upload):
        each.add_argument("--seed", default="course", help="what cases are drawn from")
    make.add_argument("--out", type=Path, default=OUT / "course")
    marks.add_argument("--out", type=Path, default=OUT / "grades")
    commands.add_parser("list", help="which exercises are graded")
    told = parser.parse_args()
    if told.command == "build":
        from .build import build, dry_run

        out = told.out.resolve()
        build(out, told.seed, pages=not told.no_pages)
        tests = dry_run(out / "gradescope.zip", ["01_memory"])
        got, of = (sum(t[key] for t in tests) for key in ("score", "max_score"))
        print(f"built in {out}; dry run of gradescope.zip: {got:g} of {of} points")
        if got < of:
            raise SystemExit(f"the references do not get full points: {tests}")
    elif told.command == "grade":
        if not landlock() and not told.trusting:
            raise SystemExit(f"{OPEN} If you trust all students, add --trusting.")
        try:
            class_ = grade(told.submissions, told.out, told.seed, told.jobs)
        except (RuntimeError, OSError) as error:
            raise SystemExit(f"grading stopped: {error}") from error
        for student, mine in class_.items():
            print("{:20} {:g} of {}".format(student, *totals(mine)))
        print(f"{len(class_)} students: {told.out / 'grades.csv'}")
    elif told.command == "gradescope":
        if not landlock():
            print(OPEN)  # only teachers see it
        gradescope(told.folder, told.seed)
    else:
        print(listing())


def listing() -> str:
    """Which exercises of each chapter a program grades, and which a person."""
    lines, graded, every = [], 0, 0
    for chapter in chapters():
        known = [asked.label for asked in load(chapter)]
        missing = [label for label in labels(chapter) if label not in known]
        graded, every = graded + len(known), every + len(known) + len(missing)
        rest = f"; by a person, with a rubric: {', '.join(missing)}" if missing else ""
        lines.append(f"{chapter:18} {len(known)} graded{rest}")
    return "\n".join([*lines, f"{graded} of {every} exercises and projects are graded"])


if __name__ == "__main__":
    main()
