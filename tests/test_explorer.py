"""The memory explorer: its numbers, its two hosts, and the page in a real browser."""

from __future__ import annotations

import html
import json
from functools import partial
from itertools import product
from typing import Any

import pytest
import traitlets
from conftest import LIVE, Cells, Show, find

from minizero import estimate
from minizero.config import ConfigError
from minizero.lab.explorables import measured
from minizero.lab.explorables.config import ConfigExplorer, plans
from minizero.lab.explorables.memory import (
    STATES,
    MemoryExplorer,
    coefficients,
    explorer,
)
from minizero.lab.plots.style import amount
from minizero.memory.plan import OPTIMIZERS

FOUND = ("css selector", ".found")
WIDGET = "application/vnd.jupyter.widget-view+json"

CASES: list[dict[str, Any]] = [
    {},
    {"n_params": 175e9, "world_size": 64, "stage": 1, "device_memory": 40},
    {"n_params": 1e8, "world_size": 1, "stage": 0, "device_memory": 24},
    {"n_params": 1e12, "world_size": 1024, "optimizer": "momentum"},
    {"n_params": 13e9, "precision": "fp32", "optimizer": "sgd", "stage": 2},
    {"n_params": 70e9, "world_size": 16, "offload_optimizer": True},
    {"n_params": 70e9, "offload_optimizer": True, "offload_param": True},
    {"n_params": 13e9, "world_size": 4, "offload_param": True, "device_memory": 141},
]


def fewest(widget: MemoryExplorer, stage: int) -> float:
    """Fewest GPUs at which a stage fits, by search; infinite beyond 10^9."""

    def fits(world_size: int) -> bool:
        there = estimate(
            widget.n_params,
            world_size,
            stage,
            widget.precision,
            widget.optimizer,
            offload_optimizer="cpu" if widget.offload_optimizer and stage else None,
            offload_param="cpu" if widget.offload_param and stage == 3 else None,
        )
        return there.total <= widget.device_memory * 1e9

    low, high = 0, 10**9
    if not fits(high):
        return float("inf")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# --- Numbers ---


def test_coefficients_give_what_estimate_gives() -> None:
    table = coefficients()
    checked = 0
    for stage, precision, optimizer, state, param in product(
        range(4), ("bf16", "fp32"), OPTIMIZERS, (0, 1), (0, 1)
    ):
        ask = partial(
            estimate,
            stage=stage,
            precision=precision,
            optimizer=optimizer,
            offload_optimizer="cpu" if state else None,
            offload_param="cpu" if param else None,
        )
        line = table.get(f"{stage}/{precision}/{optimizer}/{state}{param}")
        if line is None:
            with pytest.raises(ValueError, match="must be sharded"):
                ask(7e9, 8)
            continue
        for n, gpus in product((1e8, 7e9, 1e12), (1, 3, 8, 1024)):
            there = ask(n, gpus)
            for name, (whole, split) in line.items():
                want = there.host.total if name == "host" else getattr(there, name)
                assert n * (whole + split / gpus) == pytest.approx(want, rel=1e-12)
                checked += 1
    # Stage 0 offloads nothing, 1 and 2 the optimizer state, 3 either or both.
    assert len(table) == (1 + 2 + 2 + 4) * 2 * len(OPTIMIZERS)
    assert checked == len(table) * 4 * 12


def test_explorer_gives_the_7b_example() -> None:
    widget = explorer(n_params=7e9, world_size=8)
    totals = [widget.breakdown(stage).total / 1e9 for stage in range(4)]
    assert totals == [112, 38.5, 26.25, 14]
    assert widget.breakdown() == widget.breakdown(3)
    assert "112 GB, 38.5 GB, 26.25 GB, 14 GB" in repr(widget)


def test_offload_reaches_only_what_is_sharded() -> None:
    widget = explorer(offload_optimizer=True, offload_param=True)
    hosts = [widget.breakdown(stage).host.total / 1e9 for stage in range(4)]
    assert hosts == [0, 84 / 8, (84 + 14) / 8, 112 / 8]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n_params", 1e13, "n_params is 1e[+]13; choose from 1e[+]08 to 1e[+]12"),
        ("n_params", 9e7, "n_params is 9e[+]07"),
        ("n_params", float("nan"), "n_params is nan"),
        ("n_params", "1,5B", "n_params.*float.*'1,5B'"),
        ("world_size", 12, "world_size.*1, 2, 4, .* 1024], not the int 12"),
        ("stage", 4, "stage.*not the int 4"),
        ("precision", "int8", "precision.*int8"),
        ("device_memory", 16, "device_memory.*16"),
    ],
)
def test_impossible_controls_are_refused(name: str, value: Any, message: str) -> None:
    widget = explorer()
    before = getattr(widget, name)
    with pytest.raises(traitlets.TraitError, match=message):
        setattr(widget, name, value)
    assert getattr(widget, name) == before
    with pytest.raises(traitlets.TraitError, match=message):
        explorer(**{name: value})


def test_python_sees_the_controls() -> None:
    widget, seen = explorer(), []
    widget.observe(lambda change: seen.append(change.new), "world_size")
    # What the widget manager does when the reader moves the slider.
    widget.set_state({"world_size": 64})
    assert seen == [64]
    assert widget.breakdown(3).total == 112e9 / 64


# --- The output that serves both hosts ---


def bundle(widget: MemoryExplorer) -> dict[str, Any]:
    both = widget._repr_mimebundle_()
    assert both is not None
    return both[0]


def test_output_holds_widget_page_and_text() -> None:
    widget = explorer()
    data = bundle(widget)
    assert set(data) == {WIDGET, "text/html", "text/plain"}
    assert data[WIDGET]["model_id"] == widget.model_id
    assert data["text/plain"] == repr(widget)
    # No ids and no addresses, so a second run stores the same page.
    assert data["text/html"] == bundle(explorer())["text/html"]


def test_rendered_book_takes_the_page() -> None:
    """With the override that the book's configuration makes."""
    render = pytest.importorskip("myst_nb.core.render")
    kinds = set(bundle(explorer()))

    def first(overrides: list[list[Any]]) -> str:
        order = render.get_mime_priority("html", overrides)
        return next(kind for kind in order if kind in kinds)

    assert first([]) == WIDGET
    assert first([["html", "text/html", 5]]) == "text/html"


def test_page_without_javascript_shows_the_numbers() -> None:
    cells = Cells(explorer().static_html()).cells
    assert cells == ["0", "112 GB", "1", "38.5 GB", "2", "26.25 GB", "3", "14 GB"]


# --- In a browser ---


def rows(root: Any) -> list[Any]:
    return root.find_elements("css selector", ".row")


def test_page_shows_the_bytes_of_estimate(show: Show) -> None:
    widgets = [explorer(**state) for state in CASES]
    roots = show(*(widget.static_html() for widget in widgets))
    assert len(roots) == len(widgets)
    for widget, root in zip(widgets, roots, strict=True):
        for stage, row in enumerate(rows(root)):
            there = widget.breakdown(stage)
            want = [there.parameters, there.gradients, there.optimizer]
            shown = json.loads(row.get_dom_attribute("data-bytes"))
            assert shown == pytest.approx([*want, there.host.total], rel=1e-12)
            fits = there.total <= widget.device_memory * 1e9
            verdict = find(row, ".verdict")
            assert ("yes" in verdict.get_dom_attribute("class")) == fits
            assert ("does not fit" not in verdict.text) or not fits
            least = float(row.get_dom_attribute("data-least").lower())
            assert least == fewest(widget, stage)
        chosen = [row for row in rows(root) if find(row, "input").is_selected()]
        assert chosen == [rows(root)[widget.stage]]


def test_page_says_it_in_words(show: Show) -> None:
    (root,) = show(explorer(n_params=7e9, world_size=8).static_html())
    heads = [" ".join(find(row, ".head").text.split()) for row in rows(root)]
    assert heads == [
        "Data parallel nothing is sharded 112 GB ✗ fits on no number of GPUs",
        "ZeRO-1 shards the optimizer state 38.5 GB ✓ fits, from 2 GPUs up",
        "ZeRO-2 shards gradients too 26.25 GB ✓ fits, from 2 GPUs up",
        "ZeRO-3 shards everything 14 GB ✓ fits, from 2 GPUs up",
    ]
    assert find(root, ".words").text == (
        "ZeRO-3 on 8 GPUs: 14 GB on each (parameters 1.75 GB, gradients 1.75 GB, "
        "optimizer 10.5 GB), which fits in 80 GB. The fewest GPUs on which it fits: 2. "
        "Activations and buffers come on top."
    )
    bar = find(rows(root)[0], ".track").get_dom_attribute("aria-label")
    assert bar == "parameters 14 GB, gradients 14 GB, optimizer 84 GB"


def test_bars_are_in_proportion(show: Show) -> None:
    (root,) = show(explorer(n_params=7e9, world_size=8).static_html())
    widths = [
        [part.size["width"] for part in row.find_elements("css selector", ".bar > div")]
        for row in rows(root)
    ]
    track = find(root, ".track").rect
    unit = track["width"] / 112  # the longest bar takes all of its track
    assert widths[0] == pytest.approx([14 * unit, 14 * unit, 84 * unit], abs=1)
    assert widths[3] == pytest.approx([1.75 * unit, 1.75 * unit, 10.5 * unit], abs=1)
    tag = find(root, ".capacity span").rect
    middle = tag["x"] + tag["width"] / 2 - track["x"]
    assert middle == pytest.approx(80 * unit, abs=1)


def test_measured_bytes_stand_beside_the_estimate(show: Show) -> None:
    """They are the file's, and differ by step counters and padding alone."""
    (root,) = show(explorer().static_html())
    assert not any(found.is_displayed() for found in root.find_elements(*FOUND))
    buttons = root.find_elements("css selector", "[aria-label='Measured runs'] button")
    for button, run in zip(buttons, measured.runs(), strict=True):
        button.click()
        widget = explorer(n_params=run["n_params"], world_size=run["world_size"])
        for stage, found in enumerate(root.find_elements(*FOUND)):
            more = run["held"][stage] - widget.breakdown(stage).total
            assert 0 <= more < 1000
            assert found.text == (
                f"measured {amount(run['held'][stage])}: {amount(more)} more"
            )
    find(root, "input[type=checkbox]").click()  # nothing was measured with this
    assert not any(found.is_displayed() for found in root.find_elements(*FOUND))


def test_published_peaks_stand_beside_the_estimate(show: Show) -> None:
    """What they differ by, from few GPUs to many, with the error of the estimate."""
    (root,) = show(explorer().static_html())
    note = find(root, ".published")
    assert not note.is_displayed()
    buttons = root.find_elements("css selector", "[aria-label='Published runs'] button")
    assert [one.text for one in buttons] == [f"{n} GPUs" for n in (8, 32, 64, 128)]
    for button, wanted in zip(buttons, (3, 1, 1, 3), strict=True):
        button.click()
        number = int(button.text.split()[0])
        runs = [r for r in measured.published() if number in (r["few"], r["many"])]
        assert len(runs) == wanted
        for run in runs:
            few, many = (
                estimate(run["n_params"], run[at], 3, "fp32").total
                for at in measured.ENDS
            )
            found = run["peaks"][0] - run["peaks"][1]
            error = f"{100 * ((few - many) / found - 1):.1f} %"
            assert f"{amount(found)} {amount(few - many)} {error}" in note.text
    find(root, "[aria-label=GPUs]").send_keys("\ue014")
    assert not note.is_displayed()


def test_keyboard_reaches_and_moves_every_control(browser: Any, show: Show) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    actions = pytest.importorskip("selenium.webdriver").ActionChains
    (root,) = show(explorer().static_html())

    def press(*sequence: str) -> None:
        actions(browser).send_keys(*sequence).perform()

    def focused() -> str:
        return browser.execute_script(
            "const e = document.activeElement.shadowRoot?.activeElement;"
            "return e && (e.ariaLabel || e.closest('label')?.innerText ||"
            " e.innerText).split('\\n')[0].trim()"
        )

    reached = []
    for _ in range(25):
        press(keys.TAB)
        reached.append(focused())
    assert reached == [
        *("Parameters, as a number", "Parameters"),
        *("1.5B", "7B", "13B", "70B", "175B"),
        *("GPUs", "Precision", "Optimizer", "Memory of a GPU"),
        *("optimizer state", "parameters", "1 rank", "2 ranks", "4 ranks"),
        *("8 GPUs", "32 GPUs", "64 GPUs", "128 GPUs"),
        *(
            "ZeRO-3",
            *("Link to this setting", "Numbers"),
            None,
            "Parameters, as a number",
        ),
    ]

    def total(stage: int) -> str:
        return find(rows(root)[stage], ".total").text

    find(root, "[aria-label=GPUs]").send_keys(keys.ARROW_RIGHT)
    assert (total(0), total(3)) == ("112 GB", "7 GB")
    assert find(root, "output").text == "On 16 GPUs"
    press(keys.TAB)
    assert focused() == "Precision"
    press(keys.ARROW_DOWN)  # fp32: 4 + 4 + 8 bytes, as many as bf16's 2 + 2 + 12
    assert (total(0), total(1)) == ("112 GB", "59.5 GB")
    rows(root)[3].find_element("css selector", "input").send_keys(keys.ARROW_UP)
    assert find(root, ".words").text.startswith("ZeRO-2 on 16 GPUs: ")


def test_number_of_parameters_is_typed(browser: Any, show: Show) -> None:
    (root,) = show(explorer().static_html())
    field = find(root, "input[type=text]")

    def type_in(text: str) -> str:
        field.clear()
        field.send_keys(text + "\n")
        return field.get_property("value")

    for text, shown in [
        ("175B", "175B"),
        ("7.5e9", "7.5B"),
        ("350 m", "0.35B"),
        ("1,000,000,000,000", "1T"),
    ]:
        assert type_in(text) == shown
        assert find(root, ".error").text == ""
    commas = ("1,5B", "0,350B", "1,00B", "10,0000M", "1,000,00M")
    for text in ("", "many", "99M", "2T", "-7B", "7BB", *commas):
        assert type_in(text) == text
        assert field.get_dom_attribute("aria-invalid") == "true"
        assert find(root, ".error").text == (
            "Write a number from 0.1B to 1T, decimals after a point, such as 7.5B."
        )
        assert find(rows(root)[0], ".total").text == "16 TB"  # the last that held
    assert type_in("7B") == "7B"
    assert field.get_dom_attribute("aria-invalid") == "false"


def test_widget_talks_to_its_model(browser: Any, show: Show) -> None:
    """What Jupyter's widget manager sees: values in, values out, and an end."""
    widget = explorer()
    (root,) = show(LIVE % (widget._esm, json.dumps(widget.state())))
    select = find(root, "select")
    presets = find(root, ".presets").find_elements("css selector", "button")
    for control in (
        *presets, *root.find_elements("css selector", "input[type=checkbox]")
    ):  # fmt: skip
        control.click()
    select.send_keys("fp32")
    rows(root)[1].click()
    sent = browser.execute_script("return sent")
    assert [message for message in sent if message != "saved"] == [
        *(["n_params", n] for n in (1.5e9, 7e9, 13e9, 70e9, 175e9)),
        *(["offload_optimizer", True], ["offload_param", True]),
        *(["precision", "fp32"], ["stage", 1]),
    ]
    assert sent[1::2] == ["saved"] * 9
    for name, value in (message for message in sent if message != "saved"):
        setattr(widget, name, value)  # Python takes each as it comes
    browser.execute_script("receive('world_size', 1024)")
    assert find(root, "output").text == "On 1,024 GPUs"
    browser.execute_script("clean()")
    assert browser.execute_script("return listening()") == 0


# --- The config explorer ---


def config(stage: Any, state: str, param: str, **more: Any) -> dict[str, Any]:
    """A config with these keys, a path beside "nvme"."""
    blocks = {
        name: {"device": on} | ({"nvme_path": "files"} if on == "nvme" else {})
        for name, on in (("offload_optimizer", state), ("offload_param", param))
    }
    zero = {"stage": stage, **blocks}
    return {"train_batch_size": 1024, "zero_optimization": zero, **more}


SGD = {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}
CONFIGS = [
    config(0, "cpu", "none"),
    config(1, "nvme", "cpu", bf16={"enabled": True}),
    config(2, "cpu", "none", fp16={"enabled": True}, optimizer=SGD),
    config(3, "nvme", "nvme", optimizer={"type": "SGD"}),
    config(3, "CPU", "nvme", bf16={"enabled": True}, optimizer={"type": "adam"}),
]


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
        "offload_param": "parameters are sharded at stage 3 only, and the stage is 1"
    }


def test_config_explorer_without_javascript() -> None:
    widget = ConfigExplorer()
    cells = Cells(widget.static_html()).cells
    assert cells == ["device", "1.75 GB", "host", "12.25 GB", "disk", "0 B"]
    assert repr(widget) == (
        "7B parameters on 8 ranks: a rank keeps 1.75 GB on its device, 12.25 GB on "
        "the host, 0 B on disk."
    )
    wrong = ConfigExplorer({"train_batch_size": 8, "fp16": {"enable": True}})
    assert html.escape(repr(wrong)) in wrong.fallback()
    with pytest.raises(ConfigError, match='no key "enable"'):
        wrong.breakdown()


def test_config_explorer_shows_the_bytes_of_estimate(show: Show) -> None:
    widgets = [
        ConfigExplorer(source, n_params=n, world_size=ranks)
        for source in CONFIGS
        for n, ranks in ((7e9, 8), (1.31e9, 64))
    ]
    roots = show(*(widget.static_html() for widget in widgets))
    for widget, root in zip(widgets, roots, strict=True):
        there = widget.breakdown()
        for place, part in (
            ("device", there), ("cpu", there.host), ("nvme", there.disk)
        ):  # fmt: skip
            row = find(root, f'[data-place="{place}"]')
            shown = dict(json.loads(row.get_dom_attribute("data-parts")))
            want = {name: getattr(part, name) for name in STATES}
            assert shown == pytest.approx(want, rel=1e-12)
            assert find(row, ".after").text == amount(part.total)


def test_config_explorer_says_what_is_wrong(show: Show) -> None:
    sources = [
        config(2, "none", "cpu"),
        config(3, "none", "none", seed=1, train_batch_size=100),
        config(3, "none", "none", fp16={"enable": True}),
        config("3", "none", "none"),
        {"zero_optimization": {"stage": 1}},
        {"train_batch_size": 64, "gradient_accumulation_steps": 4},
    ]
    widgets = [ConfigExplorer(source, world_size=8) for source in sources]
    roots = show(*(widget.static_html() for widget in widgets))
    said = [find(root, "ul").text for root in roots]
    assert "offload_param has no effect: parameters are sharded at" in said[0]
    assert "train_batch_size = 100 does not divide" in said[1]
    assert 'the config has no key "seed"' in said[1]
    assert 'fp16 has no key "enable"' in said[2]
    assert "stage is 0 to 3" in said[3]
    assert "the size of a batch is not known" in said[4]
    assert said[5] == (
        "A step takes 64 samples: 2 * 4 * 8 (micro-batch * accumulation * ranks)."
    )


def test_config_explorer_controls_write_the_config(show: Show) -> None:
    """And what is typed moves the controls."""
    select = pytest.importorskip("selenium.webdriver.support.select").Select
    (root,) = show(ConfigExplorer().static_html())
    area = find(root, "textarea")
    stage, precision, state, _ = (
        select(e) for e in root.find_elements("css selector", "select")
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
    assert "A step takes 8 samples" in find(root, "ul").text
