"""Runs notebooks from their first cell to their last and stores the outputs.

    python notebooks/rerun.py                        every notebook beside this file
    python notebooks/rerun.py 05_zero1.ipynb ...     these

What is stored says nothing of the machine but its results: no timings of cells, no
version of Python, no path outside the project.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 1800
"""Seconds; a cell that trains on a slow machine may need many."""

METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
CELL_KEYS = {"mystnb", "tags"}
WIDGET = "application/vnd.jupyter.widget-view+json"


def main(names: list[str]) -> None:
    """Run the notebooks; the first that fails ends the program with its error."""
    folder = Path(__file__).parent
    for path in [Path(n) for n in names] or sorted(folder.glob("[!_.]*.ipynb")):
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        try:
            run(notebook, path.parent)
        except CellExecutionError as error:
            sys.exit(f"{path} was not changed: one of its cells failed.\n\n{error}")
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


def run(notebook: Any, folder: Path) -> None:
    """Execute every cell in a fresh kernel whose working directory is `folder`."""
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # what a cell prints is one text, however it came
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute()


def clean(notebook: Any) -> None:
    """Delete what differs from machine to machine, and from run to run."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {k: v for k, v in cell.metadata.items() if k in CELL_KEYS}
        )
        for output in cell.get("outputs", []):
            _clean_output(output)


def _clean_output(output: Any) -> None:
    if "text/html" in output.get("data", {}):
        # A figure is alive once its cell has run; till then its page stands there.
        output.data.pop(WIDGET, None)
    if "metadata" in output:
        output.metadata = nbformat.from_dict(
            {k: v for k, v in output.metadata.items() if "/" in k}  # by MIME type
        )
    if "text" in output:
        output.text = _without_paths(output.text)
    if "traceback" in output:
        output.traceback = [_without_paths(line) for line in output.traceback]
        output.evalue = _without_paths(output.evalue)
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/") and isinstance(data, str):
            output.data[kind] = _without_paths(data)


def _without_paths(text: str) -> str:
    """Paths from the project's root, or from site-packages; no object addresses."""
    paths = sysconfig.get_paths()
    for prefix, name in (
        (paths["purelib"], "site-packages"),
        (paths["stdlib"], "python"),
        (f"{ROOT}", "."),
    ):
        home = f"{Path.home()}"
        for form in {prefix, prefix.replace(home, "~", 1)}:
            text = text.replace(f"{form}/", f"{name}/")
    text = re.sub(r"/tmp/ipykernel_\d+/", "", text)
    return re.sub(r"(<.*?) at 0x[0-9a-fA-F]+(>)", r"\1\2", text)


if __name__ == "__main__":
    main(sys.argv[1:])
