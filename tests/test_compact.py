"""How large the package is, how deep its classes are, and what imports what.

`python tests/test_compact.py` prints the table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minizero"

LINES = {
    "zero": (2_200, 2_200),
    "memory precision": (1_147, 1_150),
    "ranks": (750, 750),
    "comm": (941, 950),
    "overlap": (650, 650),
    "activations": (545, 550),
    "offload": (1_095, 1_150),
    "checkpoint": (1_000, 1_050),
    "config": (672, 690),
    "engine": (1_381, 1_450),
    "deepspeed": (488, 600),
    "hf kernels": (928, 950),
    "scale": (1_450, 1_450),
}
"""Most lines of each folder, docstrings and blanks included, and the aim."""
CORE, CORE_FILES = (13_469, 13_500), (94, 110)
COURSE = (1_693, 2_500)
LAB, TESTS = (5_000, 5_000), (16_000, 16_000)
ARROWS = 70


def sources(folder: Path) -> list[Path]:
    """The Python files of a folder, without what tools write."""
    found = sorted(folder.rglob("*.py"))
    return [path for path in found if path.name != "_modidx.py"]


def core() -> list[Path]:
    """The files of the package without its laboratory."""
    return [path for path in sources(PACKAGE) if PACKAGE / "lab" not in path.parents]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def table() -> list[tuple[str, int, int, int]]:
    """Of each folder or sum: its name, its lines, how many it may and should have."""
    rows = [
        (names, lines([p for n in names.split() for p in sources(PACKAGE / n)]), *most)
        for names, most in LINES.items()
    ]
    course = sources(PACKAGE / "lab" / "course")
    return rows + [
        ("core", lines(core()), *CORE),
        ("core, files", len(core()), *CORE_FILES),
        ("lab", lines(sources(PACKAGE / "lab")) - lines(course), *LAB),
        ("course", lines(course), *COURSE),
        ("tests", lines(sources(ROOT / "tests")), *TESTS),
    ]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_size(row: tuple[str, int, int, int]) -> None:
    """It grows no more; the aim is the last column that the table prints."""
    name, count, most, _ = row
    assert count <= most, name


def test_every_folder_has_a_budget() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - {"lab"} == set(" ".join(LINES).split())


@cache
def classes() -> list[type]:
    """Every class that the core defines."""
    found: dict[type, None] = {}
    for module in pkgutil.walk_packages([str(PACKAGE)], "minizero."):
        if module.name.startswith(("minizero.lab", "minizero.__main__")):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__.startswith("minizero."):
                found[value] = None
    return list(found)


def ours(kind: type) -> list[str]:
    """The names of a class and its ancestors that this package defines."""
    return [k.__name__ for k in kind.__mro__ if k.__module__.startswith("minizero.")]


def test_no_class_has_more_than_four_ancestors() -> None:
    deep = {kind.__name__: ours(kind)[1:] for kind in classes() if len(ours(kind)) > 5}
    assert not deep


def imports(path: Path) -> set[str]:
    """What a file imports, modules and the names taken from them, at any depth."""
    module = ("minizero", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = module[: len(module) - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else ())))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def arrows() -> set[tuple[str, str]]:
    """Which folder of the core imports which."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found = {
        (path.relative_to(PACKAGE).parts[0], (*name.split("."), "")[1])
        for path in core()
        for name in imports(path)
        if name.startswith("minizero.")
    }
    return {(a, b) for a, b in found if a != b and {a, b} <= folders}


def test_no_file_imports_itself_through_others() -> None:
    """No import circle, not even for types alone."""
    graph: dict[str, set[str]] = {}
    modules = {
        ".".join(("minizero", *p.relative_to(PACKAGE).with_suffix("").parts)): p
        for p in sources(PACKAGE)
        if p.name != "__init__.py"
    }
    for name, path in modules.items():
        found = imports(path)
        graph[name] = {n for n in found if n in modules and n != name}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_few_arrows_between_folders() -> None:
    assert len(arrows()) <= ARROWS, sorted(arrows())


if __name__ == "__main__":
    print(f"{'':20}{'lines':>8}{'most':>8}{'aim':>8}")
    for name, *numbers in table():
        print(f"{name:20}" + "".join(f"{n:8,}" for n in numbers))
    print(f"{'arrows':20}{len(arrows()):8}{ARROWS:8}")
