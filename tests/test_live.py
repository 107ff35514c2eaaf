"""Explorables in a live JupyterLab: moved there, read in Python, and the reverse."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nbformat
import pytest
from conftest import ROOT, find, until
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

CELLS = (
    "from minizero.lab.explorables.memory import explorer\n"
    "from minizero.lab.explorables.timeline import Timeline\n"
    "memory, timeline = explorer(), Timeline(moment=0)\n"
    "display(memory, timeline)",
    "print(memory.world_size, timeline.moment, timeline.offload)",
    "memory.world_size, timeline.stage, timeline.moment = 64, 1, 0.75",
)


@pytest.fixture
def lab(browser: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with a notebook of `CELLS`, and nobody's settings."""
    folders = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    settings = {f"JUPYTER_{name}": str(tmp_path / name) for name in folders}
    settings |= {"IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT)}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(notebook, tmp_path / "live.ipynb")
    token = secrets.token_hex(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        *("--no-browser", "--allow-root", "--expose-app-in-browser"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    )
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words],
            cwd=tmp_path,
            env=os.environ | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                urlopen(f"http://127.0.0.1:{port}/api?token={token}").close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/lab/tree/live.ipynb?token={token}"
    finally:
        browser.get("about:blank")  # a page would miss its server
        server.terminate()
        server.wait()


@pytest.mark.thorough
def test_python_and_the_reader_move_the_same_values(browser: Any, lab: str) -> None:
    """A slider is moved in the browser, which has focus, read in Python, set there."""
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    browser.get(lab)
    ready = "return window.jupyterapp?.shell.currentWidget?.context?.sessionContext"
    ready += ".session?.kernel?.status === 'idle'"
    until(browser, lambda: browser.execute_script(ready))

    def run(cell: int) -> None:
        browser.execute_script(
            "jupyterapp.shell.currentWidget.content.activeCellIndex = arguments[0];"
            "jupyterapp.commands.execute('notebook:run-cell')",
            cell,
        )

    def roots() -> list[Any]:
        return [
            frame.shadow_root
            for frame in browser.find_elements("class name", "explorable-frame")
        ]

    run(0)
    until(browser, lambda: len(roots()) == 2)
    memory, timeline = roots()
    find(memory, "[aria-label=GPUs]").send_keys(Keys.ARROW_RIGHT)
    assert find(memory, "output").text == "On 16 GPUs"
    find(timeline, ".scrub").send_keys(Keys.END)
    offload = timeline.find_elements("css selector", "select")[1]
    Select(offload).select_by_visible_text("disk")
    run(1)
    printed = ("css selector", ".jp-OutputArea-output pre")
    until(browser, lambda: browser.find_elements(*printed))
    assert browser.find_element(*printed).text.split() == ["16", "1.0", "disk"]
    run(2)
    until(browser, lambda: find(memory, "output").text == "On 64 GPUs")
    scrub = find(timeline, ".scrub")
    until(browser, lambda: scrub.get_property("value") == "0.75")
    plan = find(timeline, "select")
    assert Select(plan).first_selected_option.text == "ZeRO-1"
    theme = "'apputils:change-theme', { theme: 'JupyterLab Dark' }"
    browser.execute_script(f"jupyterapp.commands.execute({theme})")
    scheme = find(timeline, ".box").value_of_css_property
    until(browser, lambda: scheme("color-scheme") == "dark")
    lanes = find(timeline, ".lanes")  # a cell is out of the page for a while

    def fits() -> bool:  # once it has been told its new size
        width = float(lanes.get_dom_attribute("viewBox").split()[2])
        return abs(width - lanes.size["width"]) <= 1

    until(browser, fits)
    errors = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert errors == []
