"""The checks that read the code without running it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Run

COLLECTIVES = re.compile(
    r"(all_reduce|reduce_scatter|all_gather|broadcast|barrier|reduce|gather|scatter)"
    r"|all_to_all|monitored_barrier|.*(_tensor|_single|_object|_object_list|_coalesced)"
)
# Paths of the machine where a notebook was run or a file was written.
MACHINE = re.compile(r"/(home|Users|root|work|opt)/[\w.]|/tmp/ipykernel_\d")


def test_ruff(tool: Run) -> None:
    tool("ruff", "check")


@pytest.mark.thorough
def test_types(tool: Run) -> None:
    tool("mypy")


def test_imports(tool: Run) -> None:
    tool("lint-imports")


def test_only_comm_calls_collectives(root: Path) -> None:
    """Else a call would be missing from the ledger."""
    found = []
    for path in sorted((root / "minizero").rglob("*.py")):
        if path.parent.name == "comm":
            continue
        # before the first call of a script, and after the last
        around = {"barrier"} if path.parent.name == "ranks" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("dist", "distributed")
                and COLLECTIVES.fullmatch(node.attr)
                and node.attr not in around
            ):
                found.append(f"{path.name}:{node.lineno} dist.{node.attr}")
    assert not found


def files(root: Path) -> list[Path]:
    """The files of the project: what git knows or would add."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("this is not a git repository, so its files are not known")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [root / name for name in listed.splitlines() if (root / name).is_file()]


def test_no_path_of_a_machine(root: Path) -> None:
    found = []
    for path in files(root):
        if path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)}:{number} {match[0]}..."
            for number, line in enumerate(text.splitlines(), 1)
            for match in MACHINE.finditer(line)
        ]
    assert not found


def test_top_level_is_as_documented(root: Path) -> None:
    """A new name at the top needs a reason and a line in the README."""
    names = {path.relative_to(root).parts[0] for path in files(root)}
    assert names <= {
        ".ci",
        ".gitignore",
        "LICENSE",
        "LICENSE-text",
        "Makefile",
        "README.md",
        "_config.yml",
        "_toc.yml",
        "book",
        "minizero",
        "notebooks",
        "pyproject.toml",
        "requirements.txt",
        "requirements-bench.txt",
        "tests",
    }
