"""The course from the command line: `python -m minizero.lab.course`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .exercise import ROOT, chapters, labels, load
from .grade import grade, gradescope, totals

OUT = ROOT / "_build" / "course"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minizero.lab.course")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="notebooks, book, zip, syllabi")
    make.add_argument("--no-pages", action="store_true", help="do not render the book")
    marks = commands.add_parser("grade", help="a folder with a folder for each student")
    marks.add_argument("submissions", type=Path)
    marks.add_argument("--jobs", type=int, default=1, help="answers at a time")
    upload = commands.add_parser("gradescope", help="what Gradescope's zip runs")
    upload.add_argument("folder", type=Path)
    sample = commands.add_parser("sample", help="write five submissions to try it on")
    sample.add_argument("folder", type=Path)
    for each in (make, marks, upload):
        each.add_argument("--seed", default="course", help="what cases are drawn from")
    for each in (make, marks):
        each.add_argument("--out", type=Path, default=None)
    commands.add_parser("list", help="which exercises are graded")
    told = parser.parse_args()
    if told.command == "build":
        from .build import build, dry_run

        out = (told.out or OUT).resolve()
        build(out, told.seed, pages=not told.no_pages)
        tests = dry_run(out / "gradescope.zip", ["01_memory"])
        got, of = (sum(t[key] for t in tests) for key in ("score", "max_score"))
        print(f"dry run of gradescope.zip: {got:g} of {of} points")
        print(f"built in {out}")
        if got < of:
            raise SystemExit(f"the references do not get full points: {tests}")
    elif told.command == "grade":
        out = (told.out or OUT.parent / "grades").resolve()
        class_ = grade(told.submissions, out, told.seed, told.jobs)
        for student, mine in class_.items():
            print("{:20} {:g} of {}".format(student, *totals(mine)))
        print(f"{len(class_)} students: {out / 'grades.csv'}")
    elif told.command == "gradescope":
        gradescope(told.folder, told.seed)
    elif told.command == "sample":
        from .build import sample as write_sample

        write_sample(told.folder)
        print(f"five submissions in {told.folder}")
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
