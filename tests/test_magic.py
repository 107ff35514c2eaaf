"""`%%ranks` and `launch` in a real Jupyter kernel."""

import ast
import os
import re
import signal
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parent.parent
LIMIT = 120  # seconds for a cell, on a machine that is slow to start ranks


class Notebook:
    """A kernel that runs cells and keeps what they show."""

    def __init__(self, folder, ranks):
        own = {"TMPDIR": str(folder), "MINIZERO_RANKS": str(ranks)}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=os.environ | own, cwd=str(ROOT))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)
        assert self.run("%load_ext minizero") == ""
        # however slow a machine is, ranks come back before they are ended
        self.run("from minizero.ranks import pool\npool.PATIENCE = 1000")

    def run(self, cell, when=None):
        """The cell's output. At the first sign of output, `when` is called."""
        shown = []

        def show(message):
            content = message["content"]
            kind = message["header"]["msg_type"]
            if kind == "stream":
                shown.append(content["text"])
            elif kind == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif kind == "error":
                shown.append("\n".join(content["traceback"]))
            if kind == "stream" and when is not None and len(shown) == 1:
                when()

        self.client.execute_interactive(cell, timeout=LIMIT, output_hook=show)
        return "".join(shown)

    def interrupt(self):
        self.manager.interrupt_kernel()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def notebook(folder):
    notebook = Notebook(folder, ranks=2)
    yield notebook
    notebook.close()
    limit = time.monotonic() + LIMIT
    while list(folder.glob("pymp-*")):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_names_last_from_cell_to_cell(notebook):
    assert notebook.run("%%ranks\nfrom minizero.ranks import rank\nx = rank()") == ""
    assert notebook.run("%%ranks\nprint('x')\nx") == (
        "[rank 0] x\n[rank 0] 0\n[rank 1] x\n[rank 1] 1\n"
    )
    assert "NameError" in notebook.run("x")  # the kernel has no such name


def test_pull(notebook):
    cell = "from minizero.lab.magic import pull\npull('x')"
    assert notebook.run(cell) == "[0, 1]"
    assert "ranks 0, 1 raised NameError: no variable 'z'" in notebook.run("pull('z')")


def test_an_error_is_short_and_keeps_names(notebook):
    shown = notebook.run("%%ranks\ny = 5\nif x:\n    1 / 0")
    lines = shown.splitlines()
    assert lines[0] == ("RankError: rank 1 raised ZeroDivisionError: division by zero")
    assert re.fullmatch(r'  File "<cell \d+>", line 3, in <module>', lines[3])
    assert lines[4] == "    1 / 0"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert len(lines) <= 7
    assert "\x1b" not in shown
    assert notebook.run("pull('y')") == "[5, 5]"


def test_an_interrupt_ends_the_ranks(notebook):
    cell = "%%ranks\nimport time\nprint('ready')\ntime.sleep(1000)"
    shown = notebook.run(cell, when=notebook.interrupt)
    assert shown.endswith("\nKeyboardInterrupt: the ranks were ended.")
    assert "NameError: name 'x' is not defined" in notebook.run("%%ranks\nx")


def test_a_hang_explains_itself(notebook):
    # with all that a rank imports at first
    notebook.run("%%ranks\nimport time, torch\nfrom minizero import comm, ranks")
    cell = """%%ranks --timeout 3
if ranks.rank() == 1:
    time.sleep(1000)
comm.all_reduce(torch.ones(8))"""
    shown = notebook.run(cell)
    assert "RankError: the ranks hang: no progress in 3 s." in shown
    assert "in collective 1, all_reduce of 8 float32" in shown
    assert re.search(r"rank 1 .*it is at line 2 of <module> \(<cell \d+>\)", shown)


def test_dead_ranks_are_replaced(notebook):
    notebook.run("%%ranks\nimport os\npid = os.getpid()")
    for pid in ast.literal_eval(notebook.run("pull('pid')")):
        os.kill(pid, signal.SIGKILL)
    alive = "from minizero.lab import magic\nwhile magic._pool.alive:\n    pass"
    assert notebook.run(alive) == ""
    assert notebook.run("%%ranks\nprint('os' in globals())") == (
        "The 2 ranks have died; 2 new ones start, without any names.\n"
        "[rank 0] False\n[rank 1] False\n"
    )


def test_another_number_of_ranks(notebook):
    assert notebook.run("%%ranks 3\n'here'") == (
        "The 2 ranks make room; 3 new ones start, without any names.\n"
        "[rank 0] 'here'\n[rank 1] 'here'\n[rank 2] 'here'\n"
    )
    assert notebook.run("%%ranks\n1") == "[rank 0] 1\n[rank 1] 1\n[rank 2] 1\n"


@pytest.mark.parametrize("line", ["two", "0", "-1", "1 2", "--timeout"])
def test_a_line_that_makes_no_sense(notebook, line):
    shown = notebook.run(f"%%ranks {line}\nprint('no')")
    assert shown.startswith("UsageError: ")
    assert shown.count("\n") <= 1


def test_a_traceback_shows_the_lines_of_cells(notebook):
    notebook.run("import minizero\ndef fails():\n    raise ValueError('no')")
    shown = notebook.run("minizero.launch(fails, 2)")
    assert "    raise ValueError('no')\n" in shown
    assert "minizero/ranks" not in shown
