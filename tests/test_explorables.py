"""All explorables: one base, pages that need nothing, and numbers that are Python's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import nbformat
import pytest
import traitlets
from conftest import LIVE, ROOT, Show, find

from minizero.lab.explorables.base import MOUNT, Explorable, module
from minizero.lab.explorables.blocktime import BlockTime
from minizero.lab.explorables.config import ConfigExplorer
from minizero.lab.explorables.exchanges import WAYS, Exchanges
from minizero.lab.explorables.formats import FormatExplorer
from minizero.lab.explorables.interval import (
    SaveInterval,
    best_interval,
    duration,
    lost,
)
from minizero.lab.explorables.memory import MemoryExplorer
from minizero.lab.explorables.shards import Shards
from minizero.lab.explorables.stepcost import StepCost
from minizero.lab.plots.style import amount

ALL: list[type[Explorable]] = [
    MemoryExplorer,
    Exchanges,
    Shards,
    FormatExplorer,
    StepCost,
    BlockTime,
    SaveInterval,
    ConfigExplorer,
]
each = pytest.mark.parametrize("kind", ALL)


def parts(row: Any) -> list[list[Any]]:
    """What a bar shows: [name, number] of each part."""
    return json.loads(row.get_dom_attribute("data-parts"))


def bars(root: Any) -> list[list[list[Any]]]:
    return [parts(row) for row in root.find_elements("css selector", "[data-parts]")]


# --- What holds for each of them ---


@each
def test_page_reaches_for_nothing(kind: type[Explorable]) -> None:
    page = kind().static_html()
    assert not re.search(r"https?:|//cdn|\bimport\b|\brequire\b|\bfetch\b|src=", page)
    assert page.count("</script>") == 1
    assert len(page) < 40_000


@each
def test_unknown_control_is_refused(kind: type[Explorable]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no control 'colour'"):
        kind(colour="red")


@pytest.mark.parametrize("width", [380, 720])
def test_all_fit_on_a_page(browser: Any, show: Show, width: int) -> None:
    """One after the other, none wider than the page, and every control has a name."""
    wide = [
        MemoryExplorer(n_params=1e12, world_size=1, device_memory=24),
        Exchanges(ranks=8),
        Shards(ranks=1),
        FormatExplorer(weight=-19.75, update=-29.75),
        SaveInterval(n_params=1e13, node_days=9999),
    ]
    widgets = [*(kind() for kind in ALL), *wide]
    roots = show(*(widget.static_html() for widget in widgets), width=width)
    assert len(roots) == len(widgets)
    overflow = browser.execute_script("return document.documentElement.scrollWidth")
    assert overflow <= width
    outside = browser.execute_script(
        """
        const scrolls = (e) => e && (/auto|scroll|hidden/.test(
            getComputedStyle(e).overflowX) || scrolls(e.parentElement));
        return [...document.querySelectorAll(".explorable-frame")].flatMap((host) =>
            [...host.shadowRoot.querySelectorAll("*")].filter((e) =>
                e.getBoundingClientRect().right > innerWidth + 0.5
                && !scrolls(e.parentElement)).map((e) => e.outerHTML));
        """
    )
    assert outside == []
    for root in roots[: len(ALL)]:
        selector = "input, select, button, textarea"
        controls = root.find_elements("css selector", selector)
        assert controls and all(control.accessible_name for control in controls)


@pytest.mark.parametrize(
    ("theme", "page", "text"),
    [
        ("light", "rgb(255, 255, 255)", "rgb(34, 40, 50)"),
        ("dark", "rgb(18, 18, 18)", "rgb(206, 214, 221)"),
    ],
)
def test_all_follow_the_theme(
    browser: Any, show: Show, theme: str, page: str, text: str
) -> None:
    """Even where the theme puts html outputs on a light card."""
    style = (
        f"html {{ --pst-color-text-base: {text}; color-scheme: {theme};"
        f" background: {page} }}"
        "html[data-theme=dark] .text_html { background: rgb(206, 214, 221);"
        " color: rgb(34, 40, 50) }"
    )
    roots = show(*(kind().static_html() for kind in ALL), theme=theme, style=style)
    for card in browser.find_elements("css selector", ".text_html"):
        assert card.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
    for root in roots:
        for selector in (".box", ".name", "select", "input", ".words"):
            for element in root.find_elements("css selector", selector):
                colour = element.value_of_css_property("color")
                assert colour.replace("rgba", "rgb").replace(", 1)", ")") == text
                scheme = element.value_of_css_property("color-scheme")
                assert scheme == theme


def state(widget: Explorable) -> dict[str, Any]:
    """What Jupyter's widget manager hands to the page, but for its own."""
    own = ("layout", "tabbable", "tooltip")
    values = widget.get_state().items()
    return {n: v for n, v in values if not n.startswith("_") and n not in own}


@each
def test_sliders_stay_where_python_follows(
    browser: Any, show: Show, kind: type[Explorable]
) -> None:
    """From end to end each value is one that the widget takes, and Python hears it."""
    widget = kind()
    page = LIVE % (widget._esm, json.dumps(state(widget)))
    (root,) = show(page)
    sliders = root.find_elements("css selector", "input[type=range]")
    assert sliders
    for slider in sliders:
        drawn = []
        for end in ("min", "max"):
            browser.execute_script(
                "sent.length = 0; const [slider, end] = arguments;"
                "slider.value = slider[end]; slider.dispatchEvent(new Event('input'));",
                slider,
                end,
            )
            (name, value), saved, *_ = browser.execute_script("return sent")
            assert saved == "saved"
            setattr(widget, name, value)  # Python takes it
            drawn.append(find(root, ".box").get_property("innerHTML"))
        assert drawn[0] != drawn[1]
    browser.execute_script("clean()")
    assert browser.execute_script("return listening()") == 0


# --- Numbers ---


def in_page(browser: Any, show: Show, source: str, script: str, *values: Any) -> Any:
    """What a function of a module gives."""
    show(f'<script type="module">{source}\nwindow.it = {script}</script>')
    return browser.execute_script("return arguments[0].map(it)", list(values))


def test_amounts_and_durations_are_written_as_in_python(
    browser: Any, show: Show
) -> None:
    numbers = [0, 0.4, 7, 999.5, 1e3, 1.5e6, 26.25e9, 38.5e9, 112e9, 1.64e12, 16e15]
    found = in_page(browser, show, module(), "amount", *numbers)
    assert found == [amount(number) for number in numbers]
    source = module("interval.js").replace("export default", "window.render =")
    times = [0.25, 12, 84, 1139, 5317, 86_400, 1e9]
    found = in_page(browser, show, source, "duration", *times)
    assert found == [duration(seconds) for seconds in times]


def sent(way: str, ranks: int) -> list[float]:
    """Elements that each rank sends in all, as shares of the buffer."""
    share = (ranks - 1) / ranks
    if way == "rank 0":  # everybody to it, and it to everybody
        return [ranks - 1.0] + [1.0] * (ranks - 1)
    return [2 * share] * ranks


def test_exchanges(browser: Any, show: Show) -> None:
    """At the end every rank holds every sum, and has sent what the formula says."""
    cases = list(product(WAYS, (2, 3, 8)))
    widgets = [Exchanges(way=way, ranks=ranks, step=99) for way, ranks in cases]
    roots = show(*(widget.static_html() for widget in widgets))
    for (way, ranks), root in zip(cases, roots, strict=True):
        words = find(root, ".words")
        found = json.loads(words.get_dom_attribute("data-sent"))
        assert found == pytest.approx(sent(way, ranks))
        last = 2 * (ranks - 1) if way == "ring" else 2
        assert words.text.startswith(f"Step {last} of {last}.")
        held = [cell.text for cell in root.find_elements("css selector", "td")][1:]
        assert len(held) == ranks**2
        everybody = sorted("".join(map(str, range(ranks))))
        assert all(sorted(who) == everybody for who in held)
    (root,) = show(Exchanges(ranks=4, step=0).static_html())
    on = find(root, "button[aria-label='one step on']")
    for _ in range(8):
        on.click()
    assert find(root, ".words").text == "Step 6 of 6. Each rank has sent 1.5 Ψ."


def test_shards(show: Show) -> None:
    cases = list(product((1, 5, 8), (1, 7, 32)))
    widgets = [Shards(ranks=ranks, bucket=bucket) for ranks, bucket in cases]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        size = -(-24 // widget.ranks)
        columns = max(1, widget.bucket // widget.ranks)
        words = find(root, ".words")
        assert json.loads(words.get_dom_attribute("data-layout")) == {
            "padded": size * widget.ranks,
            "calls": -(-size // columns),
            "most": min(columns, size) * widget.ranks,
            "sent": pytest.approx(widget.sent()),
        }
        cells = root.find_elements("css selector", ".cell")
        assert len(cells) == size * widget.ranks


def test_formats(show: Show) -> None:
    cases = [(0.0, -10.0), (-19.0, -26.0), (15.0, 3.25), (0.25, 0.0), (-8.0, -16.5)]
    widgets = [FormatExplorer(weight=w, update=u) for w, u in cases]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        lines = root.find_elements("css selector", "tbody tr")
        found = [float(line.get_dom_attribute("data-kept")) for line in lines]
        for share, right in zip(found, widget.kept().values(), strict=True):
            if math.isfinite(share):  # not too large for the format
                # the page adds exactly, where Python rounds the sum to fp32 first
                assert share == pytest.approx(right, abs=1e-6)


def test_step_cost(show: Show) -> None:
    widgets = [StepCost(compute=400), StepCost(tokens=256, latency=1000, unit=0.1)]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        found = [number for ((_, number),) in bars(root)]
        assert found == pytest.approx(widget.times())
    assert "ZeRO-2 40 % of the step" in find(roots[0], ".words").text


def test_block_time(show: Show) -> None:
    """Both bars, on either side of the number of tokens from which calls hide."""
    widgets = [BlockTime(tokens=tokens) for tokens in (256, 2048, 131_072)]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        compute, move = widget.times()
        at_once, overlapped = ([number for _, number in bar] for bar in bars(root))
        assert at_once == pytest.approx([compute, move, 2 * compute, 2 * move])
        wait = max(0.0, move - compute)
        want = [compute, wait, 2 * compute, 2 * wait]
        assert overlapped == pytest.approx(want, abs=1e-18)
        words = find(root, ".words").text
        assert f"hides from {widget.least_tokens():,.0f} tokens" in words
        gain = (compute + move) / max(compute, move)
        assert f"{gain:.2f} times as fast" in words
        hidden = widget.tokens >= widget.least_tokens()
        assert hidden == (not any(overlapped[1::2]))


def test_save_interval(show: Show) -> None:
    widgets = [
        SaveInterval(n_params=70e9, bandwidth=10, nodes=128),
        SaveInterval(n_params=1e13, bandwidth=0.1, nodes=16_384, node_days=1),
    ]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        best = best_interval(widget.save, widget.between)
        for factor, bar in zip((0.25, 0.5, 1, 2, 4), bars(root), strict=True):
            (_, saves), (_, again) = bar
            share = lost(factor * best, widget.save, widget.between)
            assert saves + again == pytest.approx(share)
            standing = widget.save / (factor * best + widget.save)
            assert saves == pytest.approx(min(share, standing))
        assert find(root, ".words").text == widget.describe()


# --- In the notebooks ---


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_stored_explorables_are_those_of_today(path: Any) -> None:
    """`make rerun` stores them anew when the lab's JavaScript has changed."""
    modules = {f"\n{kind._esm}{MOUNT}</script>" for kind in ALL}
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            if 'class="explorable"' in page and "_esm" not in cell.source:
                assert any(page.endswith(source) for source in modules), cell.id


Traits = Callable[..., Explorable]


@pytest.mark.parametrize(
    ("make", "control", "value"),
    [
        (Exchanges, "ranks", 9),
        (Exchanges, "way", "tree"),
        (Shards, "bucket", 0),
        (FormatExplorer, "weight", 30.0),
        (StepCost, "tokens", 1.0),
        (BlockTime, "ranks", 1),
        (SaveInterval, "nodes", 0),
        (ConfigExplorer, "world_size", 0),
    ],
)
def test_impossible_values_are_refused(make: Traits, control: str, value: Any) -> None:
    with pytest.raises(traitlets.TraitError, match=control):
        make(**{control: value})
