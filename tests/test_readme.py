"""What the README and the index page promise is what there is."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from conftest import Run
from packaging.requirements import Requirement

from minizero import estimate
from minizero.__main__ import main
from minizero.lab.plots.style import amount

PAGES = ("README.md", "book/index.md")
ROW = re.compile(r"^\| (\d+) \| \[([^]]+)\]\(([^)]+)\) \| [^|]+ \| ([^|]*) \|", re.M)


def chapters(root: Path) -> list[str]:
    """The notebooks of _toc.yml, in order, such as "notebooks/01_memory"."""
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    listed = [c["file"] for part in toc["parts"] for c in part["chapters"]]
    return [name for name in listed if name.startswith("notebooks/")]


@pytest.mark.parametrize("page", [*PAGES, "book/how-to-use.md"])
def test_commands_are_targets(root: Path, page: str) -> None:
    makefile = (root / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):(?! override)", makefile, re.M)
    assert f".PHONY: {' '.join(targets)}\n" in makefile
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", (root / page).read_text()))
    assert named <= set(targets)


def test_readme_names_the_two_commands(root: Path) -> None:
    assert {"book", "train"} <= set(
        re.findall(r"^\$ make ([\w-]+)", (root / "README.md").read_text(), re.M)
    )
    assert re.search(r"^make test-all$", (root / ".ci" / "run").read_text(), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_table_of_chapters(root: Path, page: str) -> None:
    """Numbers, titles, links and rooms are those of the notebooks."""
    rows = {}
    for number, title, link, rooms in ROW.findall((root / page).read_text()):
        path = (root / page).parent.joinpath(link).resolve().relative_to(root)
        name = path.with_suffix("").as_posix()
        rows[name] = f"# {number}. {title}", set(re.findall(r"`(\w+)`", rooms))
    assert list(rows) == chapters(root)
    for name, (heading, rooms) in rows.items():
        path = root / f"{name}.ipynb"
        if not path.exists():
            pytest.fail(f"{name}.ipynb is in the table and does not exist")
        notebook = nbformat.read(path, as_version=4)
        assert notebook.cells[0].source.startswith(heading), name
        assert rooms == exported(notebook), name


def exported(notebook: nbformat.NotebookNode) -> set[str]:
    """The rooms that a notebook's cells go to."""
    modules = set()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for directive, name in re.findall(
            r"^#\| *(default_exp|export)\b *(\S*)", cell.source, re.M
        ):
            modules.add(name if directive == "default_exp" or name else "")
    return {name.split(".")[0] for name in modules - {""}}


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files(root: Path, page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (root / page).read_text()):
        assert (root / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_picture_says_what_estimate_says(root: Path, page: str) -> None:
    text = (root / page).read_text()
    alt = re.search(r"!\[(.*)\]|:alt: (.*)", text)
    assert alt
    for stage in range(4):
        assert amount(estimate(7e9, 8, stage).total) in alt[0]
    assert (root / "book/assets/stages.svg").read_text().count("<svg") == 1


def pins(root: Path, name: str = "requirements.txt") -> list[Requirement]:
    lines = (root / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_dependency_is_pinned(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = sum(extras.values(), project["dependencies"])
    assert all(extras.values()), "an extra is empty"
    both = pins(root) + pins(root, "requirements-bench.txt")
    pinned = {pin.name.lower(): pin for pin in both}
    for dependency in map(Requirement, wanted):
        pin = pinned[dependency.name.lower()]
        (exact,) = pin.specifier
        assert exact.operator == "==", pin
        assert exact.version in dependency.specifier, pin


def test_environment_is_the_pinned_one(root: Path) -> None:
    for pin in pins(root):
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            installed = version(pin.name)
        except PackageNotFoundError:
            pytest.fail(f"{pin} is not installed; run the tests by `make test`")
        assert pin.specifier.contains(installed, prereleases=True), (pin, installed)


def blocks(root: Path, language: str) -> list[str]:
    """The README's blocks of code in a language."""
    text = (root / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


# What the README's blocks leave to the reader.
BEFORE = """
import torch
from torch.nn.functional import mse_loss as loss_fn

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(x, y)
before = loss_fn(model(x), y).item()
"""
AFTER = """
engine.eval()
with torch.no_grad():
    after = loss_fn(engine(x.to(engine.device)), y.to(engine.device)).item()
assert after < before / 2 and engine.global_steps == 8, (before, after)
"""


@pytest.mark.thorough
def test_the_example_trains(root: Path, tmp_path: Path, tool: Run) -> None:
    """The README's config and loop, by its torchrun command, on two ranks."""
    (config,), (script, *_) = blocks(root, "json"), blocks(root, "python")
    (tmp_path / "ds_config.json").write_text(config)
    (tmp_path / "train.py").write_text(BEFORE + script + AFTER)
    text = (root / "README.md").read_text()
    [words] = re.findall(r"^\$ torchrun (--standalone .*)$", text, re.M)
    words = words.replace("--nproc-per-node=4", "--nproc-per-node=2")
    tool("torchrun", *words.split(), cwd=tmp_path)
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "global_step8"


@pytest.mark.thorough
def test_commands_of_the_package(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Each `python -m minizero` line runs, in the README's order."""
    text = (root / "README.md").read_text()
    lines = re.findall(r"^\$ python -m (minizero .*?)(?: +#.*)?$", text, re.M)
    assert len(lines) >= 5
    monkeypatch.chdir(tmp_path)
    for line in lines:
        extra = "--steps 3 --save-every 3 --out ." if " train " in line else ""
        assert main([*line.split()[1:], *extra.split()]) == 0


HUGGING_FACE = """
args = TrainingArguments(
    deepspeed="ds_config.json", max_steps=2, output_dir="out", report_to="none",
    per_device_train_batch_size=4, save_strategy="no", learning_rate=0.1,
)
rows = [{"x": a, "labels": b} for a, b in data]
class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": loss_fn(super().forward(x), labels)}
trainer = Trainer(model=Model(4, 1), args=args, train_dataset=rows)
trainer.train()
assert trainer.model_wrapped.global_steps == 2
"""
LOADER = """
loader = torch.utils.data.DataLoader(data, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.thorough
def test_the_blocks_of_hugging_face(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer's two imports in a script, and accelerate's loop as it stands."""
    pytest.importorskip("transformers")
    (config,) = blocks(root, "json")
    (tmp_path / "ds_config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    imports, loop = (b for b in blocks(root, "python") if "minizero.hf" in b)
    exec(BEFORE + imports + HUGGING_FACE, {})
    names: dict[str, Any] = {}
    exec(BEFORE + LOADER + loop, names)
    assert names["model"].global_steps == 16
