"""All explorables: one base, pages that need nothing, and numbers that are Python's."""

from __future__ import annotations

import html
import json
import math
import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest
import traitlets
from conftest import LIVE, ROOT, Show, find

from minizero.lab.explorables.base import FIGURES, Explorable, module, script
from minizero.lab.explorables.base import _read as read_files
from minizero.lab.explorables.config import ConfigExplorer
from minizero.lab.explorables.figures import (
    ActivationExplorer,
    BlockTime,
    Exchanges,
    OffloadEfficiency,
    Shards,
    StepCost,
)
from minizero.lab.explorables.formats import FormatExplorer
from minizero.lab.explorables.interval import SaveInterval
from minizero.lab.explorables.memory import MemoryExplorer
from minizero.lab.explorables.predict import Predict, choice, curve, number
from minizero.lab.explorables.published import Published
from minizero.lab.explorables.timeline import Timeline

ALL: list[type[Explorable]] = [
    MemoryExplorer,
    Exchanges,
    Shards,
    FormatExplorer,
    StepCost,
    BlockTime,
    SaveInterval,
    ConfigExplorer,
    OffloadEfficiency,
    ActivationExplorer,
    Published,
    Timeline,
]
pytestmark = pytest.mark.thorough
EVERY = [*ALL, Predict]
"""Those of questions too, which have nothing to set."""
FRAME = "explorable-frame"
each = pytest.mark.parametrize("kind", ALL)


# --- What holds for each of them ---


@each
def test_page_reaches_for_nothing(kind: type[Explorable]) -> None:
    page = kind().static_html()
    assert not re.search(r"https?:|//cdn|\bimport\b|\brequire\b|\bfetch\b|src=", page)
    assert page.count("</script>") == 1


def test_scripts_are_small() -> None:
    assert {kind.kind for kind in EVERY} == set(FIGURES)
    assert max(len(module(kind).encode()) for kind in FIGURES) <= 60_000
    assert len(script().encode()) <= 150_000


@each
def test_unknown_control_is_refused(kind: type[Explorable]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no control 'colour'"):
        kind(colour="red")


@pytest.mark.parametrize("width", [360, 768, 1440])
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


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not Published])
def test_sliders_stay_where_python_follows(
    browser: Any, show: Show, kind: type[Explorable]
) -> None:
    """From end to end each value is one that the widget takes, and Python hears it."""
    widget = kind()
    page = LIVE % (widget._esm, json.dumps(widget.state()))
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


CONFIGS = [
    json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {"device": state, "nvme_path": "files"},
                "offload_param": {"device": param, "nvme_path": "files"},
            },
            "bf16": {"enabled": half},
            "optimizer": {"type": optimizer, "params": {"lr": 1}},
        }
    )
    for stage, state, param, half, optimizer in product(
        range(4), ("cpu", "nvme"), ("cpu", "nvme"), (True, False), ("Adam", "SGD")
    )
]


def anything(widget: Explorable, rng: random.Random) -> dict[str, Any]:
    """A setting that the widget takes."""
    values: dict[str, Any] = {}
    for name, limits in widget.limits().items():
        if "choices" in limits:
            values[name] = rng.choice(limits["choices"])
            continue
        least, most = limits["least"], limits["most"] or 20
        power = rng.uniform(math.log(least), math.log(most)) if least > 0 else None
        number = rng.uniform(least, most) if power is None else math.exp(power)
        number = min(max(number, least), most)
        values[name] = round(number) if limits.get("whole") else number
    for name, value in widget.state().items():
        if isinstance(value, bool):
            values[name] = rng.random() < 0.5
    return values | ({"text": rng.choice(CONFIGS)} if "text" in widget.state() else {})


def same(found: Any, want: Any) -> bool:
    """Equal names, and numbers as near as two orders of the same operations give."""
    if isinstance(want, list):
        return len(found) == len(want) and all(map(same, found, want))
    if isinstance(want, str):
        return found == want
    if found is None or not math.isfinite(want):  # JSON has no other
        return found is None and not math.isfinite(want)
    return math.isclose(found, want, rel_tol=1e-9, abs_tol=1e-12)


SETTING = """(setting) => {
  const numbers = figure.numbers((name) => setting[name] ?? atRest.state[name]);
  const given = Object.entries(setting).filter(([name, value]) => {
    const address = new URLSearchParams({ [name]: value }).toString();
    const text = new URLSearchParams(address).get(name);
    return Stored.prototype.read.call(atRest, name, text) !== value;
  });
  return [numbers, given];
}"""
"""What is drawn for a setting, and what of it gets lost in an address."""


@each
def test_numbers_are_those_of_python(
    browser: Any, show: Show, kind: type[Explorable]
) -> None:
    """For 1,000 settings at random, and each comes back from the page's address."""
    widget, rng = kind(), random.Random(kind.__name__)
    settings = [anything(widget, rng) for _ in range(1000)]
    stored = json.dumps({"state": widget.state(), "limits": widget.limits()})
    source = widget._esm.replace("export default", "window.figure =")
    source += f"\n{read_files('page.js')}\nconst atRest = {stored};"
    for (found, missing), setting in zip(
        in_page(browser, show, source, SETTING, *settings), settings, strict=True
    ):
        for name, value in setting.items():
            setattr(widget, name, value)
        assert same(found, widget.numbers()), setting
        assert not missing


# --- What every figure has ---


def captions(roots: list[Any]) -> list[str]:
    """The settings in words."""
    return [find(root, "figcaption").get_property("textContent") for root in roots]


def test_address_holds_the_settings(browser: Any, show: Show) -> None:
    """What is set by keyboard, another visit shows; Reset takes it away again."""
    wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    roots = show(
        MemoryExplorer(world_size=16).static_html(),
        *(kind().static_html() for kind in ALL),
    )
    stored, prefixes = captions(roots), [kind.kind for kind in ALL]
    prefixes[0] = "memory-2"
    for root, prefix in zip(roots[1:], prefixes, strict=True):
        sliders = root.find_elements("css selector", "input[type=range]")
        control = sliders[0] if sliders else find(root, "select")
        control.send_keys(keys.ARROW_UP)
        link = urlsplit(find(root, ".tools a").get_property("href"))
        assert f"{prefix}." in link.query and link.fragment == f"figure-{prefix}"
    setting = captions(roots)
    assert setting[0] == stored[0]
    assert all(a != b for a, b in zip(setting[1:], stored[1:], strict=True))

    def address(_: Any) -> bool:
        query = urlsplit(browser.current_url).query
        return all(f"{prefix}." in query for prefix in prefixes)

    wait(browser, 10).until(address)
    link = browser.current_url
    assert "memory.world_size" not in link  # it is as it was stored
    browser.get("about:blank")
    browser.get(link)
    roots = [e.shadow_root for e in browser.find_elements("class name", FRAME)]
    assert captions(roots) == setting
    for root in roots[1:]:
        find(root, ".tools button").click()
    assert captions(roots) == stored
    wait(browser, 10).until(lambda _: not urlsplit(browser.current_url).query)


CONTROLS = """return [...arguments[0].querySelectorAll(
  "select, input:is([type=range], [type=checkbox])")]
  .filter((control) => !control.disabled && control.checkVisibility())"""
CENTRE = """const { width } = arguments[0].getBoundingClientRect();
  arguments[0].scrollIntoView({ block: "center" });
  const middle = (+arguments[0].min + +arguments[0].max) / 2;
  return arguments[0].valueAsNumber > middle ? -0.4 * width : 0.4 * width"""


@each
def test_every_control_answers(
    browser: Any, show: Show, kind: type[Explorable]
) -> None:
    """Each moves what is drawn, by a key and, after that, by the pointer."""
    webdriver = pytest.importorskip("selenium.webdriver")
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    select = pytest.importorskip("selenium.webdriver.support.select").Select
    (root,) = show(kind().static_html())
    box = find(root, ".box")

    def drawn() -> str:
        script = "return arguments[0].innerHTML + arguments[0].querySelector"
        script += "('figcaption').textContent"
        return str(browser.execute_script(script, box))

    controls = browser.execute_script(CONTROLS, root)
    assert controls
    for control in controls:
        sort = control.get_dom_attribute("type") or "select"
        browser.execute_script("arguments[0].click()", find(root, ".tools button"))
        before = drawn()
        if sort == "range":
            up = control.get_property("value") != control.get_dom_attribute("max")
            control.send_keys(keys.ARROW_RIGHT if up else keys.ARROW_LEFT)
        elif sort == "select":
            control.send_keys(keys.ARROW_DOWN)
            if drawn() == before:  # it was the last one
                control.send_keys(keys.ARROW_UP)
        else:
            control.send_keys(keys.SPACE)
        keyed = drawn()
        assert keyed != before, control.accessible_name
        if sort == "range":
            aside = int(browser.execute_script(CENTRE, control))
            pointer = webdriver.ActionChains(browser)
            pointer.move_to_element_with_offset(control, aside, 0).click().perform()
        elif sort == "select":
            chosen = select(control)
            options = [one for one in chosen.options if not one.is_selected()]
            options[0].click()
        else:
            control.click()
        assert drawn() != keyed, control.accessible_name


def test_fingers_do_as_well(browser: Any, show: Show) -> None:
    """Touched, a slider and the timeline's lanes follow, and targets are larger."""
    roots = show(MemoryExplorer().static_html(), Timeline(moment=0).static_html())
    touch = "Emulation.setTouchEmulationEnabled"
    browser.execute_cdp_cmd(touch, {"enabled": True})
    try:
        slider = find(roots[0], "[aria-label=GPUs]")
        assert slider.size["height"] >= 28
        for button in roots[1].find_elements("css selector", ".phases button"):
            assert button.size["height"] >= 40
        for target, scroll in ((slider, "start"), (find(roots[1], ".lanes"), "start")):
            browser.execute_script(
                "arguments[0].scrollIntoView({ block: arguments[1] })", target, scroll
            )
            place = browser.execute_script(
                "const { left, top, width, height } = arguments[0]"
                ".getBoundingClientRect(); return [left, top, width, height]",
                target,
            )
            left, top, width, height = place
            for kind, share in (("Start", 0.5), ("Move", 0.8), ("Move", 0.9)):
                point = {"x": left + share * width, "y": top + min(height / 2, 30)}
                event = {"type": f"touch{kind}", "touchPoints": [point]}
                browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
            event = {"type": "touchEnd", "touchPoints": []}
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
        assert find(roots[0], "output").text == "On 512 GPUs"
        assert float(find(roots[1], ".scrub").get_property("value")) > 0.8
    finally:
        browser.execute_cdp_cmd(touch, {"enabled": False})


def test_forced_colours_keep_what_colours_tell(browser: Any, show: Show) -> None:
    """What a colour stands for keeps it; text takes the reader's."""
    pages = (kind().static_html() for kind in ALL)
    roots = show(*pages, style="html { color: rgb(34, 40, 50) }")
    looks = """return [...arguments].map((root) => {
      const looks = (query, name) => [...root.querySelectorAll(query)].map((e) =>
        getComputedStyle(e)[name]);
      const boxes = looks(".swatch, .bar div, .paint:not(svg *)", "backgroundColor");
      return [...boxes, ...looks(".paint", "fill")];
    })"""
    before = browser.execute_script(looks, *roots)
    assert sum(map(len, before)) > 100
    ink = find(roots[0], ".box").value_of_css_property("color")
    media = {"features": [{"name": "forced-colors", "value": "active"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert browser.execute_script(looks, *roots) == before
        assert find(roots[0], ".box").value_of_css_property("color") != ink
        for phase in roots[-1].find_elements("css selector", "[aria-current=true]"):
            plain = find(roots[-1], "[aria-current=false]")
            colour = "background-color"
            assert phase.value_of_css_property(colour) != (
                plain.value_of_css_property(colour)
            )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_numbers_are_a_table_on_request(browser: Any, show: Show) -> None:
    kinds = [kind for kind in ALL if kind is not FormatExplorer]  # a table itself
    roots = show(*(kind().static_html() for kind in kinds))
    for root in roots:
        assert not root.find_elements("css selector", ".numbers table")
        find(root, "summary").click()
    browser.execute_async_script("requestAnimationFrame(arguments[0])")
    for root, kind in zip(roots, kinds, strict=True):
        lines = root.find_elements("css selector", ".numbers tr")
        heads = [find(line, "th").text for line in lines[1:]]
        assert heads == [str(row[0]) for row in kind().numbers()]
    first = find(roots[0], ".numbers tr:last-child").text
    assert first == "ZeRO-3 1.75 GB 1.75 GB 10.5 GB 0 B –"
    find(roots[0], "[aria-label=GPUs]").send_keys("\ue014")
    assert find(roots[0], ".numbers tr:last-child").text.startswith("ZeRO-3 875 MB")


def test_paper_shows_the_picture_and_its_setting(browser: Any, show: Show) -> None:
    roots = show(*(kind().static_html() for kind in ALL), theme="dark")
    media = "Emulation.setEmulatedMedia"
    browser.execute_cdp_cmd(media, {"media": "print"})
    try:
        for root in roots:
            controls = "input, select, button, textarea"
            for selector in (controls, ".tools", ".controls, .line"):
                found = root.find_elements("css selector", selector)
                assert not any(element.is_displayed() for element in found)
            caption = find(root, "figcaption")
            assert caption.is_displayed()
            assert caption.value_of_css_property("color") == "rgba(0, 0, 0, 1)"
        assert captions(roots)[0] == (
            "Memory of the model states. Parameters: 7B; GPUs: 8 GPUs; "
            "Precision: bf16; Optimizer: Adam; Memory of a GPU: 80 GB; "
            "Offload to the host, optimizer state: no; "
            "Offload to the host, parameters: no."
        )
    finally:
        browser.execute_cdp_cmd(media, {"media": ""})


def test_nothing_moves_when_a_page_loads(browser: Any, show: Show) -> None:
    pages = (kind().static_html() + "<p>after</p>" for kind in ALL)
    show(*pages, style="html { overflow-y: scroll }")  # whose bar comes with the length
    shifts = browser.execute_async_script(
        """
        const done = arguments[0];
        new PerformanceObserver((list) => done(list.getEntries().map((e) => e.value)))
            .observe({ type: "layout-shift", buffered: true });
        setTimeout(() => done([]), 300);
        """
    )
    assert shifts == []


QUESTIONS = (
    number("a number", 16.92, "MB", "Because."),
    choice("a choice", ["one", "two"], "two"),
    curve("a line", ["1", "2", "3"], [3.0, 2.0, 1.0], "%"),
)


def test_questions_show_their_answers_once_answered(browser: Any, show: Show) -> None:
    """By keyboard alone; the next visit shows both, until they are forgotten."""
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    (root,) = show(Predict(*QUESTIONS).static_html())
    assert "16.92" not in find(root, ".box").text
    field = find(root, "input[type=text]")
    told = root.find_elements("class name", "told")
    for text, words in (
        ("much\n", "Write a number, such as 1.5."),
        ("16.92\n", "You are right. The answer: 16.92 MB. Because."),
        ("4.23\n", "You are a factor of 4 too low. The answer: 16.92 MB. Because."),
        ("20\n", "You are 18.2 % too high. The answer: 16.92 MB. Because."),
        ("-1e3\n", "You are 1,017 too low. The answer: 16.92 MB. Because."),
        ("1,692\n", "You are a factor of 100 too high. The answer: 16.92 MB. Because."),
    ):
        field.clear()
        field.send_keys(text)
        assert told[0].text == words
    buttons = root.find_elements("css selector", "form button")
    find(root, "select").send_keys("one", keys.TAB, keys.ENTER)
    assert told[1].text == "That is not it. The answer: two."
    buttons[2].click()
    assert told[2].text.startswith("Draw a line first")
    points = root.find_elements("css selector", "input[type=range]")
    points[1].send_keys(keys.HOME)
    buttons[2].click()
    assert told[2].text.startswith("Your line is ")
    answers = [line.text for line in told]
    browser.refresh()
    root = browser.find_element("class name", FRAME).shadow_root
    assert [e.text for e in root.find_elements("class name", "told")] == answers
    find(root, ".tools button").click()
    assert not any(e.text for e in root.find_elements("class name", "told"))
    browser.refresh()
    root = browser.find_element("class name", FRAME).shadow_root
    assert not any(e.text for e in root.find_elements("class name", "told"))


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


# --- In the notebooks ---


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
        (Timeline, "moment", 1.1),
    ],
)
def test_impossible_values_are_refused(make: Traits, control: str, value: Any) -> None:
    with pytest.raises(traitlets.TraitError, match=control):
        make(**{control: value})
