"""How `nbdev-export` writes this book's modules; run as a program, the way back.

`#| export` puts a cell in the notebook's `default_exp` module, `#| export NAME` in
`minizero/NAME.py`. A class may be shown in several cells: a later one that holds
nothing but `class ZeRO3(ZeRO3):` reopens it, and its body follows that of the first
cell, so that the module has one class.

`python notebooks/exporter.py` brings what was edited in modules back to the cells
that they came from. (`nbdev-update` would put a class of several cells whole into the
first.)
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import nbdev.config
import nbformat
from nbdev.doclinks import _iter_py_cells
from nbdev.maker import ModuleMaker
from nbdev.process import Processor

# nbdev would list the modules that have a long docstring in minizero/__init__.py and
# in notebooks/llms.txt; the first is written by hand, the second is not wanted.
nbdev.config._substantive = lambda docstring: False

CONTINUED = "    # continued: "  # then the id of the cell that reopens the class


def reopened(source: str) -> str | None:
    """The class that a cell reopens, if it does; ValueError if it does more."""
    body = ast.parse(source).body
    for part in body:
        match part:
            case ast.ClassDef(name=name, bases=[ast.Name(id=base)]) if name == base:
                if len(body) > 1:
                    raise ValueError(f"a cell that reopens {name} may hold no more")
                return name
    return None


def merged(cells: list[Any]) -> list[Any]:
    """The cells of a module, with those that reopen a class joined to its first.

    Raises ValueError where no earlier cell ends with that class.
    """
    found: list[Any] = []
    last_class: dict[str, Any] = {}
    for cell in cells:
        name = reopened(cell.source)
        if name is None:
            found.append(cell)
            *_, last = ast.parse(cell.source).body or [None]
            if isinstance(last, ast.ClassDef):
                last_class[last.name] = cell
            continue
        if name not in last_class:
            raise ValueError(
                f"cell {cell.id} reopens class {name}, but no exported cell before it "
                "ends with that class"
            )
        first = last_class[name]
        _, body = cell.source.split(":\n", 1)
        first.set_source(f"{first.source}\n\n{CONTINUED}{cell.id}\n{body}")
    return found


class BookModules(Processor):
    """Writes the modules of a notebook, in place of nbdev's own export."""

    def begin(self) -> None:
        """Start without cells."""
        self.cells: dict[str, list[Any]] = defaultdict(list)
        self.default = ""

    def cell(self, cell: Any) -> None:
        """Note where a cell goes."""
        self.default = cell.directives_.get("default_exp", self.default)
        if cell.cell_type == "code" and "export" in cell.directives_:
            self.cells[cell.directives_["export"] or self.default].append(cell)

    def end(self) -> None:
        """Write the modules, and hide their cells from nbdev's own export."""
        folder = nbdev.config.get_config().lib_path
        for name, cells in self.cells.items():
            maker = ModuleMaker(folder, name, self.nb.path_)
            maker.make(merged(cells), lib_path=folder)
            for cell in cells:
                cell.directives_["exportd"] = ""


def absolute(code: str, parents: tuple[str, ...]) -> str:
    """Code whose relative imports, of a module in this package, are spelt out."""

    def spelt_out(found: re.Match[str]) -> str:
        dots, name = found[1], found[2]
        top = parents[: len(parents) + 1 - len(dots)]
        return f"from {'.'.join((*top, name) if name else top)} import"

    return re.sub(r"from (\.+)([\w.]*) import", spelt_out, code)


def update() -> None:
    """Bring what was edited in modules back to the cells that they came from."""
    package = Path(nbdev.config.get_config().lib_path)
    notebooks: dict[Path, Any] = {}
    for module in sorted(package.rglob("*.py")):
        for block in _iter_py_cells(module) if module.name != "_modidx.py" else ():
            if block.nb_path not in notebooks:
                notebooks[block.nb_path] = nbformat.read(block.nb_path, as_version=4)
            by_id = {cell.id: cell for cell in notebooks[block.nb_path].cells}
            first, *more = block.code.split(f"\n\n{CONTINUED}")
            sources = {block.cell_id: first}
            for part in more:
                name, body = part.split("\n", 1)
                head = by_id[name].source.split(":\n", 1)[0].splitlines()[-1]
                sources[name] = f"{head}:\n{body}"
            for name, code in sources.items():
                lines = by_id[name].source.splitlines(keepends=True)
                directives = "".join(line for line in lines if line.startswith("#|"))
                parents = module.relative_to(package.parent).parent.parts
                by_id[name].source = directives + absolute(code, parents)
    for path, notebook in notebooks.items():
        nbformat.write(notebook, path)


if __name__ == "__main__":
    update()
