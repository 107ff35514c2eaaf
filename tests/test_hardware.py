"""The machines that the book counts with, and its break-even."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minizero.lab import hardware
from minizero.lab.explorables.figures import LinkTime
from minizero.lab.hardware import (
    A100,
    NODES,
    V100,
    break_even,
    efficiency,
    intensity,
    sent,
)
from minizero.scale.machines import ATTAINED, Machine

ROOT = Path(__file__).parents[1]


def test_every_source_is_among_the_references() -> None:
    known = re.findall(
        r"^@\w+\{(\w+),", (ROOT / "book/references.bib").read_text("utf-8"), re.M
    )
    for node in NODES:
        assert node.sources and set(node.sources) <= set(known), node.name


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_units_are_bytes_and_flop_and_order_is_physical(node: Machine) -> None:
    assert 1e14 < node.peak < 1e16 and node.flops == ATTAINED * node.peak
    assert node.hbm > node.link >= node.pcie > node.network > 1e9
    assert node.dram > node.disk >= node.drive
    assert node.host > node.memory


def test_break_even_is_where_both_take_as_long() -> None:
    psi, flops, link, moved = 7e9, 400e12, 50e9, sent(3, 8)
    tokens = break_even(moved, link, flops)
    assert 6 * psi * tokens / flops == pytest.approx(psi * moved / link)
    # ZeRO-3 in bf16: F/B (N-1)/N, as the chapters write it
    assert tokens == pytest.approx(flops / link * 7 / 8)
    assert break_even(sent(2, 8), link, flops) == pytest.approx(tokens * 2 / 3)
    assert break_even(moved, link, flops, operations=8) == pytest.approx(tokens * 6 / 8)


def test_break_even_is_that_of_the_disk_and_of_the_explorables() -> None:
    peak, read = 70e12, 3e9
    tokens = break_even(32, read, peak, operations=8)
    assert efficiency(intensity("optimizer", 1024, 2), read, peak) == pytest.approx(
        1 / (1 + tokens / 2048)
    )
    unit = LinkTime(bandwidth=50, speed=400, latency=1, unit=3200)
    least = break_even(3 * 2, 50e9, 400e12)
    assert unit.least_tokens() == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("name", ["moved", "bandwidth", "flops", "operations"])
def test_break_even_refuses_what_is_not_above_zero(name: str) -> None:
    values = {"moved": 6.0, "bandwidth": 1.0, "flops": 1.0, "operations": 6.0}
    with pytest.raises(ValueError, match=f"{name} must be above 0, not 0.0"):
        break_even(**{**values, name: 0.0})


def test_table_has_a_column_for_each_node() -> None:
    head, _, *rows = repr(hardware.table()).splitlines()
    assert all(node.name in head for node in NODES) and len(rows) == len(hardware.ROWS)
    (network,) = [row for row in rows if "network" in row]
    assert network == "| network, for a GPU, GB/s | 50 | 25 | 6.25 | 1.25 |"
    assert "H100" not in repr(hardware.table(A100, V100))
