"""How often to save: the formula against dice, and its figures."""

from __future__ import annotations

import math
import random

import pytest

from minizero.lab.explorables import interval
from minizero.lab.plots import checkpoint as figures


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


def test_figures() -> None:
    shards = figures.shards_figure({"a": 20, "b": 31}, saved=4, loaded=3)
    texts = {text.get_text() for text in shards.axes[0].texts}
    assert {"file 3", "rank 2", "a", "b"} <= texts and "rank 3" not in texts
    drawn = interval.interval_figure(60, 10_800, {300.0: 0.2, 3000.0: 0.1})
    assert "19 min" in drawn.axes[0].texts[0].get_text()
    explorer = interval.SaveInterval(n_params=70e9, bandwidth=10.0, nodes=128)
    assert (explorer.save, explorer.between) == (84.0, 250 * 86_400 / 128)
    assert "save every 1.48 h" in repr(explorer) and "3.1 %" in explorer.fallback()
