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
from minizero.lab.explorables.config import ConfigExplorer, plans
from minizero.lab.explorables.memory import (
    MemoryExplorer,
    coefficients,
    explorer,
    measured,
)
from minizero.lab.plots.style import amount
from minizero.memory.plan import OPTIMIZERS

pytestmark = pytest.mark.thorough
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


def test_page_without_javascript_shows_the_numbers() -> None:
    cells = Cells(explorer().static_html()).cells
    assert cells == ["0", "112 GB", "1", "38.5 GB", "2", "26.25 GB", "3", "14 GB"]


# --- In a browser ---


def rows(root: Any) -> list[Any]:
    return root.find_elements("css selector", ".row")


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


def test_measured_bytes_stand_beside_the_estimate(show: Show) -> None:
    """They are the file's, and differ by step counters and padding alone."""
    (root,) = show(explorer().static_html())
    assert not any(found.is_displayed() for found in root.find_elements(*FOUND))
    buttons = root.find_elements("css selector", "[aria-label='Measured runs'] button")
    for button, run in zip(buttons, measured(), strict=True):
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
        "offload_param": "parameters are sharded at stage 3 only"
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
