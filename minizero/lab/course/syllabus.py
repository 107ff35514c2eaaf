"""The syllabi: which chapters and exercises a course has when, with their minutes."""

from __future__ import annotations

import re

from .exercise import chapters, labels, load, statement

SYLLABI = {
    "two-weeks": (
        "Two weeks, ten days",
        "day",
        70,
        """
        01_memory, 02_ranks, 03_data_parallel, 05_zero1, 06_zero2, 07_zero3, 08_overlap,
        09_activations, 12_checkpoint, 18_capstone
        """,
    ),
    "thirteen-weeks": (
        "Thirteen weeks",
        "week",
        1_000,
        """
        01_memory, 02_ranks, 03_data_parallel, 04_precision, 05_zero1 06_zero2,
        07_zero3, 08_overlap, 09_activations, 10_offload 11_nvme,
        12_checkpoint 13_engine, 14_kernels 15_huggingface, 16_scale 17_beyond,
        18_capstone
        """,
    ),
}
"""By name: title, what a unit is, most minutes of its exercises, units' chapters."""


def reading(chapter: str) -> int:
    """Minutes that the chapter says it takes to read and run."""
    found = re.search(r"\*Minutes:?\*+\D{0,3}(\d+)", chapters()[chapter])
    if found is None:
        raise ValueError(f"{chapter} does not say how many minutes it takes")
    return int(found[1])


def chosen(chapter: str, most: int) -> list[str]:
    """Exercises in the chapter's order, graded ones first, of `most` minutes in all."""
    graded = {asked.label for asked in load(chapter)}
    found: set[str] = set()
    for label in sorted(labels(chapter), key=lambda label: label not in graded):
        if (minutes := statement(label).minutes) <= most:
            found.add(label)
            most -= minutes
    return [label for label in labels(chapter) if label in found]


def syllabus(name: str) -> str:
    """A syllabus as a page."""
    title, unit, most, units = SYLLABI[name]
    parts = [
        f"# {title}\n",
        "Minutes are the chapters' own; points are those that the program gives. An "
        "exercise that is marked `*` is graded by a person.\n",
        f"| {unit} | chapters | read and run | exercises | minutes | points |",
        "|---|---|---|---|---|---|",
    ]
    every = 0
    for number, names in enumerate(map(str.split, units.split(",")), 1):
        read = sum(map(reading, names))
        graded = {a.label: a.points for each in names for a in load(each)}
        picked = [label for each in names for label in chosen(each, most)]
        work = sum(statement(label).minutes for label in picked)
        every += read + work
        shown = ", ".join(label + "*" * (label not in graded) for label in picked)
        points = sum(graded.get(label, 0) for label in picked)
        row = (number, ", ".join(names), read, f"{shown} ({work})", read + work, points)
        parts.append("| " + " | ".join(map(str, row)) + " |")
    parts.append(f"\nIn all {every} minutes, about {round(every / 60)} hours.")
    if name == "thirteen-weeks":
        more = sum(statement(label).minutes for label in labels("projects"))
        parts.append(f"The two projects take {more} minutes more.")
    return "\n".join(parts) + "\n"
