"""All explorables as Python makes them: pages that need nothing, and their numbers."""

from __future__ import annotations

import html
import json
import math
import random
import re
from itertools import product
from typing import Any

import nbformat
import pytest
import torch
import traitlets
from conftest import ROOT

from minizero import estimate
from minizero.config import ConfigError
from minizero.lab.explorables import formats, interval
from minizero.lab.explorables.base import FIGURES, Explorable, module, script
from minizero.lab.explorables.config import ConfigExplorer
from minizero.lab.explorables.figures import Exchanges, LinkTime, Shards
from minizero.lab.explorables.formats import FORMATS, FormatExplorer
from minizero.lab.explorables.interval import SaveInterval
from minizero.lab.explorables.memory import (
    MemoryExplorer,
    costs,
    explorer,
    gpt_shape,
    plans,
)
from minizero.lab.explorables.plans import SIZE, Plans
from minizero.lab.explorables.predict import Predict, choice, curve, number
from minizero.lab.explorables.steps import Setting, simulated
from minizero.lab.explorables.timeline import Timeline
from minizero.lab.plots import checkpoint as figures
from minizero.memory.plan import OPTIMIZERS

ALL: list[type[Explorable]] = [
    MemoryExplorer,
    Exchanges,
    Shards,
    FormatExplorer,
    LinkTime,
    SaveInterval,
    ConfigExplorer,
    Timeline,
    Plans,
]
EVERY = [*ALL, Predict]
"""Those of questions too, which have nothing to set."""
WIDGET = "application/vnd.jupyter.widget-view+json"
each = pytest.mark.parametrize("kind", ALL)


# --- What holds for each of them ---


@each
def test_page_reaches_for_nothing(kind: type[Explorable]) -> None:
    """And a control that it has not is refused."""
    page = kind().static_html()
    assert not re.search(r"https?:|//cdn|\bimport\b|\brequire\b|\bfetch\b|src=", page)
    assert page.count("</script>") == 1
    with pytest.raises(TypeError, match=f"{kind.__name__} has no control 'colour'"):
        kind(colour="red")


def test_scripts_are_small() -> None:
    assert {kind.kind for kind in EVERY} == set(FIGURES)
    assert max(len(module(kind).encode()) for kind in FIGURES) <= 60_000
    assert len(script().encode()) <= 130_000


def test_output_holds_widget_page_and_text() -> None:
    widget = explorer()
    data, again = widget._repr_mimebundle_(), explorer()._repr_mimebundle_()
    assert data and again and set(data[0]) == {WIDGET, "text/html", "text/plain"}
    assert data[0][WIDGET]["model_id"] == widget.model_id
    assert data[0]["text/plain"] == repr(widget)
    # No ids and no addresses, so a second run stores the same page.
    assert data[0]["text/html"] == again[0]["text/html"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_stored_explorables_are_those_of_today(path: Any) -> None:
    """What a page is given is what Python would give it for the same setting."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            for tag, state in re.findall(
                r'<explorable-(\w+) .*?data-state="(.*?)"', page
            ):
                (kind,) = (kind for kind in EVERY if kind.kind == tag)
                assert page == kind(**json.loads(html.unescape(state))).element()


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (MemoryExplorer, "n_params", 1e13, "is 1e[+]13; choose from 1e[+]08 to 1e[+]1"),
        (MemoryExplorer, "n_params", float("nan"), "n_params is nan"),
        (MemoryExplorer, "n_params", "1,5B", "n_params.*float.*'1,5B'"),
        (MemoryExplorer, "world_size", 12, "1, 2, 4, .* 1024], not the int 12"),
        (MemoryExplorer, "precision", "int8", "precision.*int8"),
        (Exchanges, "ranks", 9, "ranks"),
        (Exchanges, "way", "tree", "way"),
        (Shards, "bucket", 0, "bucket"),
        (FormatExplorer, "weight", 30.0, "weight"),
        (LinkTime, "tokens", 1.0, "tokens"),
        (SaveInterval, "nodes", 0, "nodes"),
        (ConfigExplorer, "world_size", 0, "world_size"),
        (Timeline, "moment", 1.1, "moment"),
    ],
)
def test_impossible_values_are_refused(
    kind: type[Explorable], name: str, value: Any, message: str
) -> None:
    widget = kind()
    before = getattr(widget, name)
    with pytest.raises(traitlets.TraitError, match=message):
        setattr(widget, name, value)
    assert getattr(widget, name) == before
    with pytest.raises(traitlets.TraitError, match=message):
        kind(**{name: value})


# --- The memory explorer ---


def test_plans_and_costs_give_what_estimate_gives() -> None:
    """Of a plan, the bytes of each state, where it rests."""
    for stage, precision, optimizer, state, param in product(
        range(4), ("bf16", "fp32"), OPTIMIZERS, ("none", "cpu"), ("none", "cpu")
    ):
        plan = plans()[f"{stage}/{state}/{param}"]
        if plan["idle"]:  # which estimate refuses, and the page leaves where it was
            continue
        on = [None if where == "none" else where for where in (state, param)]
        for n, gpus in product((1e8, 7e9, 1e12), (1, 3, 8, 1024)):
            there = estimate(n, gpus, stage, precision, optimizer, *on)
            for name, cost in costs()[f"{precision}/{optimizer}"].items():
                place, sharded = plan[name]
                held = getattr(there if place == "device" else there.host, name)
                assert n * cost / (gpus if sharded else 1) == pytest.approx(held)


def test_memory_explorer_gives_the_7b_example() -> None:
    widget = explorer(n_params=7e9, world_size=8)
    totals = [widget.breakdown(stage).total / 1e9 for stage in range(4)]
    assert totals == [112, 38.5, 26.25, 14]
    assert widget.breakdown() == widget.breakdown(3)
    assert gpt_shape(175e9) == (96, 12_288, 96)
    own = widget.activations() / 1e9
    assert 0.5 < own < 1
    widget.recomputation = "none"
    assert widget.activations() / 1e9 > 10 * own
    said = explorer(n_params=7e9, world_size=8).fallback()
    assert "stages 0 to 3 take 112.8 GB, 39.33 GB, 27.93 GB, 16.53 GB each" in said
    both = explorer(offload_optimizer=True, offload_param=True)
    hosts = [both.breakdown(stage).host.total / 1e9 for stage in range(4)]
    assert hosts == [0, 84 / 8, (84 + 14) / 8, 112 / 8]


def test_landing_figure_agrees_with_the_table_below_it() -> None:
    """Stored bytes are the formula's; equal volume takes equal time, ZeRO-3 more."""
    rows = Plans().numbers()
    for stage, (_, _, stored, most, _, _) in enumerate(rows):
        assert stored == pytest.approx(estimate(7e9, 8, stage).total, rel=1e-4)
        assert most > stored
    zero, one, two, three = (row[4] for row in rows)
    assert one == two < three
    spent = {
        verb: sum(s.end - s.begin for s in simulated(Setting(stage), SIZE).slices
                  if s.verb == verb)
        for stage, verb in enumerate(("all_reduce", "reduce_scatter"))
    }  # fmt: skip
    assert spent["all_reduce"] == pytest.approx(2 * spent["reduce_scatter"], rel=1e-3)
    sent = [row[5] / rows[0][5] for row in rows]
    assert sent == pytest.approx([1, 1, 1, 1.5], rel=1e-5)
    assert zero > one  # every rank updates everything
    peaks = [row[3] for row in rows]
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < peaks[2] / 1.5


# --- The config explorer and the questions ---


def test_config_explorer_has_a_plan_for_every_choice() -> None:
    table = plans()
    assert len(table) == 4 * 3 * 3
    assert table["3/nvme/cpu"] == {
        "parameters": ["cpu", True],
        "gradients": ["cpu", True],
        "optimizer": ["nvme", True],
        "idle": {},
    }
    assert table["1/none/cpu"]["idle"] == {
        "offload_param": "parameters are sharded at stage 3 only"
    }


def test_config_explorer_without_javascript() -> None:
    widget = ConfigExplorer()
    assert html.escape(repr(widget)) in widget.static_html()
    assert repr(widget) == (
        "7B parameters on 8 ranks: a rank keeps 1.75 GB on its device, 12.25 GB on "
        "the host, 0 B on disk."
    )
    wrong = ConfigExplorer({"train_batch_size": 8, "fp16": {"enable": True}})
    assert html.escape(repr(wrong)) in wrong.fallback()
    with pytest.raises(ConfigError, match='no key "enable"'):
        wrong.breakdown()


QUESTIONS = (
    number("a number", 16.92, "MB", "Because."),
    choice("a choice", ["one", "two"], "two"),
    curve("a line", ["1", "2", "3"], [3.0, 2.0, 1.0], "%"),
)


def test_questions_without_javascript() -> None:
    page = Predict(*QUESTIONS).static_html()
    folds = re.findall(r"<p>(.*?)</p><details>.*?</summary>(.*?)</details>", page)
    assert folds == [
        ("a number", "16.92 MB. Because."),
        ("a choice", "two."),
        ("a line", "1: 3, 2: 2, 3: 1 %."),
    ]
    with pytest.raises(ValueError, match="'three' is none of the choices"):
        choice("a choice", ["one", "two"], "three")
    with pytest.raises(ValueError, match="2 points for 1 places"):
        curve("a line", ["1"], [1.0, 2.0])


# --- Formats, and how often to save ---


@pytest.mark.parametrize("name", FORMATS)
def test_bits_and_spacing(name: str) -> None:
    dtype, exponent, significand = FORMATS[name]
    assert 1 + exponent + significand == 8 * dtype.itemsize
    assert formats.spacing(dtype, 1.0) == 2.0**-significand == torch.finfo(dtype).eps
    least = formats.smallest(dtype)
    assert torch.tensor(least, dtype=dtype).item() == least > 0
    # half of it is a tie, and zero is the even one
    assert torch.tensor(least / 2).to(dtype).item() == 0


def test_format_explorer() -> None:
    explorer = FormatExplorer(weight=0.0, update=-10.0)
    assert explorer.kept() == {
        "fp32": 1.0, "bf16": 0.0, "fp16": 1.0, "fp8 e5m2": 0.0, "fp8 e4m3": 0.0,
    }  # fmt: skip
    assert "bf16 0%" in repr(explorer) and "bf16 0%" in explorer.fallback()
    assert "weight + update" in explorer.static_html()
    tiny = FormatExplorer(weight=-19.0, update=-26.0).kept()
    assert (tiny["bf16"], tiny["fp16"]) == (1.0, 0.0)


def test_interval() -> None:
    """At the best interval no other loses less, and dice agree with the formula."""
    save, between = 60.0, 10_800.0
    best = interval.best_interval(save, between)
    assert best == math.sqrt(2 * save * between)
    least = interval.lost(best, save, between)
    for factor in (0.5, 0.8, 1.25, 2):
        assert interval.lost(factor * best, save, between) > least
    dice, done, passed = random.Random(0), 0.0, 0.0
    for _ in range(20_000):
        lasts = dice.expovariate(1 / between)
        done += best * (lasts // (best + save))
        passed += lasts
    assert 1 - done / passed == pytest.approx(least, rel=0.05)
    assert interval.lost(best, save, between, restart=600.0) > least


def test_figures_of_saves() -> None:
    shards = figures.shards_figure({"a": 20, "b": 31}, saved=4, loaded=3)
    texts = {text.get_text() for text in shards.axes[0].texts}
    assert {"file 3", "rank 2", "a", "b"} <= texts and "rank 3" not in texts
    drawn = interval.interval_figure(60, 10_800, {300.0: 0.2, 3000.0: 0.1})
    assert "19 min" in drawn.axes[0].texts[0].get_text()
    explorer = SaveInterval(n_params=70e9, bandwidth=10.0, nodes=128)
    assert (explorer.save, explorer.between) == (84.0, 250 * 86_400 / 128)
    assert "save every 1.48 h" in repr(explorer) and "3.1 %" in explorer.fallback()
