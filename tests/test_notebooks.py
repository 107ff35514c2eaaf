"""The chapters as files: complete, exported, and in the shape of a chapter.

That every cell runs, and prints what it printed, nbval tests cell by cell: pytest
collects the notebooks themselves (see `addopts` in pyproject.toml).
"""

from __future__ import annotations

import ast
import filecmp
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import ROOT, Run

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SECTIONS = (
    "Learning objectives",
    "Predict first",
    "The itch",
    "Takeaway",
    "Summary",
    "Exercises",
    "Source tour",
    "What breaks next",
)
LONGEST_LINE = 78
LONGEST_EXPORT = 100
CAPSTONE = "18_capstone"  # it uses what the others export
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}

MOST_EXPORTED = 6_500
"""Lines that all chapters together show and export."""
MOST_ENTRIES = 18
"""Of `ls minizero`, without what tools write."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@cache
def read(path: Path) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return list(notebook.cells)


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [c for c in read(path) if c.cell_type == "code" and c.source.strip()]


def prose(path: Path) -> str:
    return "\n\n".join(c.source for c in read(path) if c.cell_type == "markdown")


@each_notebook
def test_every_cell_was_run_in_order(path: Path) -> None:
    counts = [cell.execution_count for cell in code(path)]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_errors_are_intended(path: Path) -> None:
    for cell in code(path):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), (
            cell.source
        )


@each_notebook
def test_cells_are_as_rerun_leaves_them(path: Path) -> None:
    """No timings, no versions: a second run of the same cells differs nowhere."""
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) <= {"name", "pygments_lexer"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "mystnb"}, cell.source
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


@each_notebook
def test_lines_fit_the_page(path: Path) -> None:
    long = [
        line
        for cell in code(path)
        for line in cell.source.splitlines()
        if len(line) > LONGEST_LINE
    ]
    assert not long


@each_notebook
def test_figures_have_alt_text(path: Path) -> None:
    for cell in code(path):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        if any(kind.startswith("image/") for kind in kinds):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt.split()) >= 3, cell.source
    assert "![](" not in prose(path)


@each_notebook
def test_figures_are_pictures(path: Path) -> None:
    """Not `<Figure size ...>`, which is what stands there without `plots.use()`."""
    for cell in code(path):
        for data in (output.get("data", {}) for output in cell.outputs):
            if data.get("text/plain", "").startswith("<Figure"):
                assert "image/png" in data or "image/svg+xml" in data, cell.id


@each_notebook
def test_shape_of_a_chapter(path: Path) -> None:
    text = prose(path)
    number = int(path.stem.split("_")[0])
    assert re.match(rf"# {number}\. \S", text)
    for section in SECTIONS:
        heading = rf"^(#+ |[`:]{{3,}}\{{admonition\}} ){section}"
        assert re.search(heading, text, re.M), section
    assert "{cite" in text, "no source is cited"


@each_notebook
def test_exercises(path: Path) -> None:
    """Three or more, each with a label, a difficulty, minutes, a hint, a solution."""
    text = prose(path)
    parts = re.split(r"^[`:]{3,}\{exercise(?:-start)?\}", text, flags=re.M)[1:]
    assert len(parts) >= 3
    labels = [re.search(r":label: (\S+)", part) for part in parts]
    assert all(labels)
    names = [label[1] for label in labels if label]
    assert len(set(names)) == len(names)
    for name, part in zip(names, parts, strict=True):
        assert re.search(r"\d+ minutes", part), name
        assert "hint" in part.lower(), name
        assert re.search(rf"\{{solution(-start)?\}} {name}\b", text), name


def test_export_changes_nothing(tool: Run, tmp_path: Path) -> None:
    """In a copy, `nbdev-export` writes the modules that are here."""
    if not NOTEBOOKS:
        pytest.skip("there are no notebooks")
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("minizero", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tool("nbdev-export", cwd=tmp_path)
    for name in ("minizero", "notebooks", "pyproject.toml"):
        assert not differences(ROOT / name, tmp_path / name)


THREE_CELLS = [
    "#| default_exp zero.shapes",
    '#| export\n"""Shapes."""\n\nfrom __future__ import annotations',
    '#| export\nclass Square:\n    """A square of `side`."""\n\n'
    "    def __init__(self, side: int) -> None:\n        self.side = side",
    "#| export\ndef half(area: float) -> float:\n    return area / 2",
    "#| export\nclass Square(Square):\n    def area(self) -> int:\n"
    "        return self.side**2",
    "#| export\nclass Square(Square):\n    def border(self) -> int:\n"
    "        return 4 * self.side",
]


@pytest.mark.thorough
def test_a_class_in_three_cells(tool: Run, tmp_path: Path) -> None:
    """It is one class in the module; an edited method goes back to its own cell."""
    folder, module = tmp_path / "notebooks", tmp_path / "minizero/zero/shapes.py"
    for name in ("pyproject.toml", "notebooks/exporter.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "minizero").mkdir()
    path = folder / "01_shapes.ipynb"

    def write(cells: list[str]) -> None:
        notebook = nbformat.v4.new_notebook()
        for number, source in enumerate(cells):
            cell = nbformat.v4.new_code_cell(source, id=f"cell-{number}")
            notebook.cells.append(cell)
        nbformat.write(notebook, path)

    write(THREE_CELLS)
    tool("nbdev-export", cwd=tmp_path)
    names: dict[str, Any] = {}
    exec(module.read_text(), names)
    square = names["Square"](3)
    assert type(square).__mro__ == (names["Square"], object)
    assert (square.area(), square.border(), names["half"](9)) == (9, 12, 4.5)

    module.write_text(module.read_text().replace("4 * self.side", "self.side * 4"))
    tool("python", "notebooks/exporter.py", cwd=tmp_path)
    cells = nbformat.read(path, as_version=4).cells
    assert [c.source for c in cells] == [
        source.replace("4 * self.side", "self.side * 4") for source in THREE_CELLS
    ]
    text = module.read_text()
    tool("nbdev-export", cwd=tmp_path)
    assert module.read_text() == text

    write([source for source in THREE_CELLS if "__init__" not in source])
    with pytest.raises(pytest.fail.Exception, match="reopens class Square"):
        tool("nbdev-export", cwd=tmp_path)


def differences(here: Path, there: Path) -> list[str]:
    """Files that only one folder has, or that differ."""
    if here.is_file():
        return [] if filecmp.cmp(here, there, shallow=False) else [here.name]
    folders = ("__pycache__", ".ipynb_checkpoints")
    names = {
        path.relative_to(top)
        for top in (here, there)
        for path in top.rglob("*")
        if path.is_file()
        and not set(folders) & set(path.parts)
        and path.name != "_modidx.py"
    }
    return sorted(
        str(name)
        for name in names
        if not (here / name).is_file()
        or not (there / name).is_file()
        or not filecmp.cmp(here / name, there / name, shallow=False)
    )


def exported(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in code(path) if cell.source.startswith("#| export")]


def is_header(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell has a docstring, imports and names of types, and nothing else."""
    docstring, *body = ast.parse(cell.source).body
    return ast.get_docstring(ast.parse(cell.source)) is not None and all(
        isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for node in body
    )


@each_notebook
def test_what_is_exported_is_shown(path: Path) -> None:
    for cell in exported(path):
        if FOLDED & set(cell.metadata.get("tags", [])):
            assert is_header(cell), f"{cell.id} is folded"


@each_notebook
def test_an_exported_cell_is_read_at_once(path: Path) -> None:
    lengths = {cell.id: len(cell.source.splitlines()) for cell in exported(path)}
    assert not {name: n for name, n in lengths.items() if n > LONGEST_EXPORT}


def test_the_book_exports_ideas_only() -> None:
    cells = [cell for path in NOTEBOOKS for cell in exported(path)]
    assert sum(len(cell.source.splitlines()) for cell in cells) <= MOST_EXPORTED


def test_a_reader_sees_the_rooms_at_a_glance() -> None:
    package = ROOT / "minizero"
    written = ("__pycache__", "_modidx.py")
    entries = [path for path in package.iterdir() if path.name not in written]
    assert len(entries) <= MOST_ENTRIES


@each_notebook
def test_notebook_exports(path: Path) -> None:
    """A chapter grows the package: it has a module, and cells that go there."""
    sources = [cell.source for cell in code(path)]
    if path.stem == CAPSTONE:
        assert not exported(path)
        return
    assert any(source.startswith("#| default_exp ") for source in sources)
    assert any(source.startswith("#| export") for source in sources)
