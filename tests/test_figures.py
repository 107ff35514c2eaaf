"""The explorables in a real browser: one page has them all, and is visited once.

What two figures do that no other does has a page of its own: the questions keep their
answers, and the timeline opens files, plays, and answers to words of the text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import LIVE, LOCAL, Show, find, requests, until
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from test_explorables import ALL, QUESTIONS

from minizero.lab.explorables.base import FIGURES, Explorable, _read, script
from minizero.lab.explorables.config import ConfigExplorer
from minizero.lab.explorables.formats import FormatExplorer
from minizero.lab.explorables.interval import SaveInterval
from minizero.lab.explorables.memory import PAPER, MemoryExplorer, explorer
from minizero.lab.explorables.predict import Predict, number
from minizero.lab.explorables.timeline import Timeline
from minizero.lab.plots.style import amount

pytestmark = pytest.mark.thorough
FRAME = ".explorable-frame"
WIDE = [
    MemoryExplorer(n_params=1e12, world_size=1, device_memory=24),
    FormatExplorer(weight=-19.75, update=-29.75),
]
SHIFTS = """<script>window.shifts = [];
new PerformanceObserver((list) => shifts.push(...list.getEntries().map((e) => e.value)))
  .observe({ type: "layout-shift", buffered: true });</script>"""
SIZE = {"width": 768, "height": 900, "deviceScaleFactor": 1, "mobile": False}


class Gallery:
    """A page with every figure, in the order of `ALL`, and some that are wide."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address
        self.visit(address)

    def visit(self, address: str) -> None:
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
        self.browser.get("about:blank")
        self.browser.get(address)
        hosts = self.browser.find_elements("css selector", FRAME)
        self.roots = [host.shadow_root for host in hosts]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def reset(self) -> None:
        for root in self.roots:
            self.run("arguments[0].click()", find(root, ".tools button"))

    def captions(self) -> list[str]:
        """The settings in words."""
        found = [find(root, "figcaption") for root in self.roots]
        return [caption.get_property("textContent") for caption in found]


@pytest.fixture(scope="module")
def gallery(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gallery]:
    """Whatever is done there, nothing is requested from elsewhere or goes wrong."""
    requests(browser)
    browser.get_log("browser")
    page = tmp_path_factory.mktemp("gallery") / "page.html"
    figures = [*(kind() for kind in ALL), *WIDE]
    body = "".join(f"<div>{figure.element()}</div><p>after</p>" for figure in figures)
    style = "<style>html { overflow-y: scroll; color: rgb(34, 40, 50) }</style>"
    head = '<!doctype html><html data-theme="dark"><meta charset="utf-8">'
    page.write_text(f"{head}{style}{SHIFTS}<script>{script()}</script>{body}")
    yield Gallery(browser, page.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not [url for url in requests(browser) if not LOCAL.match(url)]


OUTSIDE = """const scrolls = (e) => e && (/auto|scroll|hidden/.test(
    getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return [...document.querySelectorAll(".explorable-frame")].flatMap((host) =>
    [...host.shadowRoot.querySelectorAll("*")].filter((e) =>
        e.getBoundingClientRect().right > innerWidth + 0.5
        && !scrolls(e.parentElement)).map((e) => e.outerHTML));"""


def test_nothing_moves_and_all_fit(gallery: Gallery) -> None:
    """At any width, and every control has a name."""
    assert gallery.run("return window.shifts") == []
    assert len(gallery.roots) == len(ALL) + len(WIDE)
    for root in gallery.roots[: len(ALL)]:
        controls = root.find_elements("css selector", "input, select, button, textarea")
        assert controls and all(control.accessible_name for control in controls)
    for width in (360, 1440, 768):
        size = SIZE | {"width": width}
        gallery.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # figures are drawn anew when the page has told them of it
        fits = f"return document.documentElement.scrollWidth <= {width}"
        assert until(gallery.browser, lambda script=fits: gallery.run(script))
        assert gallery.run(OUTSIDE) == []


def test_paper_shows_the_picture_and_its_setting(gallery: Gallery) -> None:
    media = "Emulation.setEmulatedMedia"
    gallery.browser.execute_cdp_cmd(media, {"media": "print"})
    shown = """return [...arguments].map((root) => [...root.querySelectorAll(
      "input, select, button, textarea, .tools, .controls, .line, figcaption")].filter(
      (e) => e.checkVisibility() && e.getClientRects().length).map((e) =>
      [e.localName, getComputedStyle(e).color]))"""
    try:
        for found in gallery.run(shown, *gallery.roots):
            assert found == [["figcaption", "rgb(0, 0, 0)"]]
    finally:
        gallery.browser.execute_cdp_cmd(media, {"media": ""})
    assert gallery.captions()[0].startswith(
        "Memory of a GPU in training. Parameters: 7B; GPUs: 8 GPUs; Precision: bf16; "
    )


def test_numbers_are_a_table_on_request(gallery: Gallery) -> None:
    for root, kind in zip(gallery.roots, ALL, strict=False):
        assert not root.find_elements("css selector", ".numbers table")
        gallery.run("arguments[0].click()", find(root, ".tools summary"))
        gallery.browser.execute_async_script("requestAnimationFrame(arguments[0])")
        heads = root.find_elements("css selector", ".numbers tr th:first-child")[1:]
        names = [head.get_property("textContent") for head in heads]
        assert names == [str(row[0]) for row in kind().numbers()]


CONTROLS = """return [...arguments[0].querySelectorAll(
  "select, input:is([type=range], [type=checkbox])")]
  .filter((control) => !control.disabled && control.checkVisibility())"""
CENTRE = """const { width } = arguments[0].getBoundingClientRect();
  arguments[0].scrollIntoView({ block: "center" });
  const middle = (+arguments[0].min + +arguments[0].max) / 2;
  return arguments[0].valueAsNumber > middle ? -0.4 * width : 0.4 * width"""


@pytest.mark.parametrize("kind", ALL)
def test_every_control_answers(gallery: Gallery, kind: type[Explorable]) -> None:
    """Each moves what is drawn, by a key and, after that, by the pointer."""
    root = gallery.roots[ALL.index(kind)]
    box = find(root, ".box")

    def drawn() -> str:
        text = "return arguments[0].innerHTML + arguments[0].querySelector"
        return str(gallery.run(text + "('figcaption').textContent", box))

    controls = gallery.run(CONTROLS, root)
    assert controls
    for control in controls:
        sort = control.get_dom_attribute("type") or "select"
        gallery.run("arguments[0].click()", find(root, ".tools button"))
        before = drawn()
        if sort == "range":
            up = control.get_property("value") != control.get_dom_attribute("max")
            control.send_keys(Keys.ARROW_RIGHT if up else Keys.ARROW_LEFT)
        elif sort == "select":
            control.send_keys(Keys.ARROW_DOWN)
            if drawn() == before:  # it was the last one
                control.send_keys(Keys.ARROW_UP)
        else:
            control.send_keys(Keys.SPACE)
        keyed = drawn()
        assert keyed != before, control.accessible_name
        if sort == "range":
            aside = int(gallery.run(CENTRE, control))
            pointer = ActionChains(gallery.browser)
            pointer.move_to_element_with_offset(control, aside, 0).click().perform()
        elif sort == "select":
            options = [o for o in Select(control).options if not o.is_selected()]
            options[0].click()
        else:
            control.click()
        assert drawn() != keyed, control.accessible_name
    gallery.run("arguments[0].click()", find(root, ".tools button"))


def test_address_holds_the_settings(gallery: Gallery) -> None:
    """What is set by keyboard, another visit shows; Reset takes it away again."""
    gallery.reset()
    stored, prefixes = gallery.captions(), [kind.kind for kind in ALL]
    prefixes += [f"{widget.kind}-2" for widget in WIDE]
    for root, prefix in zip(gallery.roots, prefixes, strict=True):
        sliders = root.find_elements("css selector", "input[type=range]")
        control = sliders[0] if sliders else find(root, "select")
        control.send_keys(Keys.ARROW_DOWN)
        link = urlsplit(find(root, ".tools a").get_property("href"))
        assert f"{prefix}." in link.query and link.fragment == f"figure-{prefix}"
    setting = gallery.captions()
    assert all(a != b for a, b in zip(setting, stored, strict=True))

    def address() -> bool:
        query = urlsplit(gallery.browser.current_url).query
        return all(f"{prefix}." in query for prefix in prefixes)

    until(gallery.browser, address)
    gallery.visit(gallery.browser.current_url)
    assert gallery.captions() == setting
    gallery.reset()
    assert gallery.captions() == stored
    until(gallery.browser, lambda: not urlsplit(gallery.browser.current_url).query)


def test_fingers_do_as_well(gallery: Gallery) -> None:
    """Touched, a slider and the timeline's lanes follow, and targets are larger."""
    browser, root = gallery.browser, gallery.roots[ALL.index(Timeline)]
    touch = "Emulation.setTouchEmulationEnabled"
    browser.execute_cdp_cmd(touch, {"enabled": True})
    try:
        slider = find(gallery.roots[0], "[aria-label=GPUs]")
        assert slider.size["height"] >= 28
        for button in root.find_elements("css selector", ".phases button"):
            assert button.size["height"] >= 40
        for target in (slider, find(root, ".lanes")):
            left, top, width, height = gallery.run(
                'arguments[0].scrollIntoView({ block: "start" });'
                "const { left, top, width, height } = arguments[0]"
                ".getBoundingClientRect(); return [left, top, width, height]",
                target,
            )
            for kind, share in (("Start", 0.5), ("Move", 0.8), ("Move", 0.9)):
                point = {"x": left + share * width, "y": top + min(height / 2, 30)}
                event = {"type": f"touch{kind}", "touchPoints": [point]}
                browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
            event = {"type": "touchEnd", "touchPoints": []}
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
        assert find(gallery.roots[0], "output").text == "On 512 GPUs"
        assert float(find(root, ".scrub").get_property("value")) > 0.8
    finally:
        browser.execute_cdp_cmd(touch, {"enabled": False})
        gallery.reset()


# --- Numbers, and the live widget ---


def config(stage: Any, state: str, param: str, **more: Any) -> dict[str, Any]:
    """A config with these keys, a path beside "nvme"."""
    blocks = {
        name: {"device": on} | ({"nvme_path": "files"} if on == "nvme" else {})
        for name, on in (("offload_optimizer", state), ("offload_param", param))
    }
    zero = {"stage": stage, **blocks}
    return {"train_batch_size": 1024, "zero_optimization": zero, **more}


CONFIGS = [
    json.dumps(
        config(*places, bf16={"enabled": half}, optimizer={"type": optimizer})
        | {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1}
    )
    for *places, half, optimizer in product(
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
        return bool(found == want)
    if found is None or not math.isfinite(want):  # JSON has no other
        return found is None and not math.isfinite(want)
    return math.isclose(found, want, rel_tol=1e-9, abs_tol=1e-12)


SETTING = """return arguments[1].map((setting) => {
  const { numbers, atRest } = figures[arguments[0]];
  const given = Object.entries(setting).filter(([name, value]) => {
    const address = new URLSearchParams({ [name]: value }).toString();
    const text = new URLSearchParams(address).get(name);
    return Stored.prototype.read.call(atRest, name, text) !== value;
  });
  return [numbers((name) => setting[name] ?? atRest.state[name]), given];
})"""
"""What is drawn for a setting, and what of it gets lost in an address."""


def test_numbers_are_those_of_python(browser: Any, show: Show) -> None:
    """For 300 settings of each at random; each comes back from the page's address."""
    widgets = {kind.kind: kind() for kind in ALL}
    source = _read("base.js", "page.js") + "\nwindow.Stored = Stored;"
    for name, widget in widgets.items():
        stored = json.dumps({"state": widget.state(), "limits": widget.limits()})
        own = _read(*FIGURES[name]).replace("export default", "return")
        source += f"\n(window.figures ??= {{}}).{name} = (() => {{\n{own}\n}})();"
        source += f"\nfigures.{name}.atRest = {stored};"
    show(f'<script type="module">{source}</script>')
    for name, widget in widgets.items():
        rng = random.Random(name)
        settings = [anything(widget, rng) for _ in range(300)]
        found = browser.execute_script(SETTING, name, settings)
        for (numbers, missing), setting in zip(found, settings, strict=True):
            for control, value in setting.items():
                setattr(widget, control, value)
            assert same(numbers, widget.numbers()), (name, setting)
            assert not missing


def test_widget_talks_to_its_model(browser: Any, show: Show) -> None:
    """What Jupyter's widget manager sees: values in, values out, and an end."""
    widget = explorer()
    (root,) = show(LIVE % (widget._esm, json.dumps(widget.state())))
    presets = find(root, ".presets").find_elements("css selector", "button")
    ticks = root.find_elements("css selector", "input[type=checkbox]")
    for control in (*presets, *ticks):
        control.click()
    find(root, "select").send_keys("fp32")
    root.find_elements("css selector", ".row")[1].click()
    sent = browser.execute_script("return sent")
    assert sent[::2] == [
        *(["n_params", n] for n in (1.5e9, 7e9, 13e9, 70e9, 175e9)),
        *([name, value] for name, value in PAPER["setting"].items()),
        *(["offload_optimizer", True], ["offload_param", True]),
        *(["precision", "fp32"], ["stage", 1]),
    ]
    assert set(sent[1::2]) == {"saved"}
    for name, value in sent[::2]:
        setattr(widget, name, value)  # Python takes each as it comes
    move = "sent.length = 0; const [slider, end] = arguments;"
    move += "slider.value = slider[end]; slider.dispatchEvent(new Event('input'));"
    for slider in root.find_elements("css selector", "input[type=range]"):
        for end in ("min", "max"):
            browser.execute_script(move, slider, end)
            setattr(widget, *browser.execute_script("return sent[0]"))
    browser.execute_script("receive('world_size', 16)")
    assert find(root, "output").text == "On 16 GPUs"
    browser.execute_script("clean()")
    assert browser.execute_script("return listening()") == 0


# --- What single figures say and do ---


def test_memory_explorer_gives_the_config_of_a_plan(show: Show) -> None:
    """Which is read, and whose plan takes what the bars say."""
    offload = {"offload_optimizer": True, "offload_param": True}
    for stage, how in product(
        range(4), ({}, offload, {"precision": "fp32", "optimizer": "momentum"})
    ):
        widget = explorer(stage=stage, micro_batch=4, **how)
        (root,) = show(widget.static_html())
        find(root, ".chart details").click()
        config = json.loads(find(root, "pre").text)
        assert config["train_micro_batch_size_per_gpu"] == 4
        assert ConfigExplorer(config).breakdown() == widget.breakdown()


def test_memory_explorer_says_it_in_words(show: Show) -> None:
    (root,) = show(explorer(n_params=7e9, world_size=8).static_html())
    rows = root.find_elements("css selector", ".row")
    heads = [" ".join(find(row, ".head").text.split()) for row in rows]
    assert heads == [
        "Data parallel nothing is sharded 112.8 GB ✗ fits on no number of GPUs",
        "ZeRO-1 shards the optimizer state 39.33 GB ✓ fits, from 2 GPUs up",
        "ZeRO-2 shards gradients too 27.93 GB ✓ fits, from 2 GPUs up",
        "ZeRO-3 shards everything 16.53 GB ✓ fits, from 2 GPUs up",
    ]
    said = find(root, ".words").text
    assert "activations 830.5 MB, buffers 1.7 GB), which fits in 80 GB" in said


def test_a_model_is_typed_once(browser: Any, show: Show) -> None:
    """Every figure that can takes it, on this visit and the next, until Reset."""
    figures = [MemoryExplorer(), ConfigExplorer(), SaveInterval(n_params=70e9)]
    page = f"<script>{script()}</script>"  # as in the book, one for all
    roots = show(page, *(figure.element() for figure in figures))
    address = browser.current_url  # figures soon write their settings behind it

    def sizes(roots: list[Any]) -> list[str]:
        return [find(root, "[type=range]").get_dom_attribute("aria-valuetext")
                for root in roots]  # fmt: skip

    find(roots[0], "[aria-pressed]:nth-child(3)").click()
    assert sizes(roots) == ["13B", "13B parameters", "13B"]
    browser.get(address)
    roots = [e.shadow_root for e in browser.find_elements("css selector", FRAME)]
    assert sizes(roots) == ["13B", "13B parameters", "13B"]
    assert "Your model" in find(roots[1], ".tools").text
    find(roots[2], ".tools button").click()
    assert sizes(roots) == ["13B", "13B parameters", "70B"]
    browser.get(address)
    roots = [e.shadow_root for e in browser.find_elements("css selector", FRAME)]
    browser.execute_script("localStorage.clear()")
    assert sizes(roots)[2] == "70B"


def test_a_prediction_returns_where_its_answer_is(browser: Any, show: Show) -> None:
    asked = number("how much?", 16.0, "MB", at="here")
    text = "<section id='here'><h2>Measured</h2><p>It is 16.</p></section>"
    (root,) = show(Predict(asked).static_html(), text)
    find(root, "input").send_keys("8\n")
    there = "#here h2 + [data-mark]"
    said = "You predicted 8 MB. You are a factor of 2 too low. The answer: 16 MB."
    until(browser, lambda: find(browser, there).text == said)
    browser.refresh()
    until(browser, lambda: find(browser, there).text == said)
    find(find(browser, FRAME).shadow_root, ".tools button").click()
    until(browser, lambda: not find(browser, there).is_displayed())


SAID = {
    "offload_param has no effect: parameters are sharded at": config(2, "none", "cpu"),
    "train_batch_size = 100 does not divide": config(
        3, "none", "none", train_batch_size=100
    ),
    'the config has no key "seed"': config(3, "none", "none", seed=1),
    'fp16 has no key "enable"': config(3, "none", "none", fp16={"enable": True}),
    "stage is 0 to 3": config("3", "none", "none"),
    "the size of a batch is not known": {"zero_optimization": {"stage": 1}},
    "A step takes 64 samples: 2 * 4 * 8 (micro-batch * accumulation * ranks).": {
        "train_batch_size": 64, "gradient_accumulation_steps": 4,
    },
}  # fmt: skip


def test_config_explorer_reads_and_writes(show: Show) -> None:
    """It says what is wrong; controls write it, and what is typed moves them."""
    widgets = [ConfigExplorer(source, world_size=8) for source in SAID.values()]
    pages = (widget.static_html() for widget in widgets)
    *roots, root = show(*pages, ConfigExplorer().static_html())
    for said, one in zip(SAID, roots, strict=True):
        assert said in find(one, "ul").text
    area = find(root, "textarea")
    stage, precision, state, _ = (
        Select(e) for e in root.find_elements("css selector", "select")
    )
    state.select_by_visible_text("disk")
    stage.select_by_visible_text("1")
    precision.select_by_visible_text("bf16")
    written = json.loads(area.get_property("value"))
    assert written["zero_optimization"]["stage"] == 1
    assert written["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme", "nvme_path": "files",
    }  # fmt: skip
    assert written["bf16"] == {"enabled": True} and "fp16" not in written
    want = ConfigExplorer(written).breakdown()
    assert find(root, '[data-place="nvme"] .after').text == amount(want.disk.total)
    area.clear()
    area.send_keys('{"train_batch_size": 8, "zero_optimization": {"stage": 2')
    assert "cannot be read" in find(root, "ul").text
    assert area.get_dom_attribute("aria-invalid") == "true"
    area.send_keys("}}")
    assert stage.first_selected_option.text == "2"


def test_questions_show_their_answers_once_answered(browser: Any, show: Show) -> None:
    """By keyboard alone; the next visit shows both, until they are forgotten."""
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
    find(root, "select").send_keys("one", Keys.TAB, Keys.ENTER)
    assert told[1].text == "That is not it. The answer: two."
    buttons[2].click()
    assert told[2].text.startswith("Draw a line first")
    points = root.find_elements("css selector", "input[type=range]")
    browser.execute_script("arguments[0].focus()", points[1])  # it is not to be seen
    ActionChains(browser).send_keys(Keys.HOME).perform()
    buttons[2].click()
    assert told[2].text.startswith("Your line is ")
    answers = [line.text for line in told]

    def again() -> tuple[Any, list[str]]:
        browser.refresh()
        root = find(browser, FRAME).shadow_root
        return root, [e.text for e in root.find_elements("class name", "told")]

    root, kept = again()
    assert kept == answers
    find(root, ".tools button").click()
    assert not any(again()[1])
