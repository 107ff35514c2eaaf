"""Lets one notebook export several modules: `nbdev-export` loads it by its name.

`#| export` puts a cell in the notebook's `default_exp` module. `#| export NAME` puts
it in `minizero/NAME.py`. By itself nbdev expects that a notebook of its own has made
that file, and adds the cells to its end, once more at each export. Here the file is
written anew from the notebook's cells, so a second export changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import nbdev.config
from nbdev.maker import ModuleMaker
from nbdev.process import Processor

# nbdev would list the modules that have a long docstring in minizero/__init__.py and
# in notebooks/llms.txt; the first is written by hand, the second is not wanted.
nbdev.config._substantive = lambda docstring: False


class NamedModules(Processor):
    """Writes the modules that a notebook names in `#| export NAME`."""

    def begin(self) -> None:
        """Start without cells."""
        self.cells: dict[str, list[Any]] = defaultdict(list)
        self.default = ""

    def cell(self, cell: Any) -> None:
        """Note where a cell goes."""
        self.default = cell.directives_.get("default_exp", self.default)
        name = cell.directives_.get("export")
        if cell.cell_type == "code" and name:
            self.cells[name].append(cell)

    def end(self) -> None:
        """Write the modules, and hide their cells from nbdev's own export."""
        if self.default in self.cells:
            raise ValueError(
                f"{self.nb.path_} exports to {self.default!r} by name, which is its "
                "default_exp already; write `#| export` without the name"
            )
        folder = nbdev.config.get_config().lib_path
        for name, cells in self.cells.items():
            ModuleMaker(folder, name, self.nb.path_).make(cells, lib_path=folder)
            for cell in cells:
                cell.directives_["exportd"] = ""
