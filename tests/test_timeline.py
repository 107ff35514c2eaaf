"""The timeline: its steps, the traces it draws, and the figure in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Show, find, until
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from minizero.lab.explorables.base import module
from minizero.lab.explorables.packing import Pack
from minizero.lab.explorables.steps import TICK, Setting, line, settings, simulated
from minizero.lab.explorables.timeline import Timeline, all_steps
from minizero.lab.plots.style import short
from minizero.memory.plan import PRECISIONS, estimate
from minizero.memory.trace import Change, Moment, Slice, Trace

pytestmark = pytest.mark.thorough


def in_page(browser: Any, show: Show, source: str, script: str, *values: Any) -> Any:
    """What a function of a module gives."""
    show(f'<script type="module">{source}\nwindow.it = {script}</script>')
    return browser.execute_script("return arguments[0].map(it)", list(values))


SOURCE = module("timeline").replace("export default", "window.figure =")
TOLD = """(trace) => ({
  ranks: trace.ranks, total: trace.total,
  slices: trace.slices.map((s) => [s.rank, s.lane, s.begin, s.end, s.verb, s.unit,
    s.bytes, s.call, s.source.join("#")]),
  moments: trace.moments.map((m) => [m.rank, m.time, m.changes]),
})"""


# --- The steps ---


@pytest.mark.parametrize("stage", range(4))
def test_steps_begin_with_what_the_formula_says(stage: int) -> None:
    """The state at rest, on the device and off it, as `estimate` has it."""
    for at in settings():
        if at.stage != stage:
            continue
        trace = simulated(at)
        time, rest = next(trace.live(0))
        assert time == 0
        placed = {"device": 0, "host": 0, "disk": 0}
        for (place, _), nbytes in rest.items():
            placed[place] += nbytes
        size = PRECISIONS["bf16"][0]
        elements = sum(
            change.nbytes // size * (trace.ranks if stage == 3 else 1)
            for change in trace.moments[0].changes
            if change.category == "parameters"
        )
        formula = estimate(elements, trace.ranks, at.plan, "bf16")
        wanted = (formula.total, formula.host.total, formula.disk.total)
        assert tuple(placed.values()) == wanted
        *_, (_, last) = trace.live(0)
        there = {where: nbytes for where, nbytes in last.items() if nbytes}
        assert there == rest  # what came has gone


def test_every_plan_sends_what_the_formula_says() -> None:
    """2, 2, m + 1 and 3m times the model's elements, and N - 1 of N parts of them."""
    for at in settings():
        trace, m = simulated(at), at.micro_batches
        times = (2, 2, m + 1, 3 * m)[at.stage]
        rest = (c for c in trace.moments[0].changes if c.category == "parameters")
        bytes_ = sum(c.nbytes for c in rest) * (trace.ranks if at.stage == 3 else 1)
        sent = sum(s.nbytes for s in trace.slices if s.call >= 0)
        assert sent == times * bytes_ * (trace.ranks - 1) // trace.ranks, at


def test_chapters_say_what_is_drawn() -> None:
    """What is waited for, what an update finds, what is sent when."""

    def at(**how: Any) -> Trace:
        return simulated(Setting(**how))

    def spent(trace: Trace, *verbs: str) -> float:
        return sum(s.end - s.begin for s in trace.slices if s.verb in verbs)

    eager, late = at(stage=0), at(stage=0, overlap=True)
    waits = [(s.begin, s.end) for s in eager.slices if s.verb == "wait"]
    assert all((s.begin, s.end) in waits for s in eager.slices if s.call >= 0)
    assert spent(late, "wait") < spent(eager, "wait")
    updates = [spent(at(stage=stage), "update") for stage in (0, 1)]
    assert updates[1] == pytest.approx(updates[0] / 4)

    gradients = [
        {row[0]: row[1] for row in Timeline(
            stage=stage, overlap=False, moment=0.817).numbers()}["gradients"]
        for stage in (1, 2)
    ]  # fmt: skip
    assert gradients[0] == 4 * gradients[1]

    one, three = (at(stage=stage, micro_batches=2) for stage in (1, 3))
    second = [s.begin for s in one.slices if s.verb == "forward"][5]
    assert not [s for s in one.slices if s.call >= 0 and s.begin < second]
    gathers = [s for s in three.slices if s.verb == "all_gather"]
    once = [s for s in at(stage=3).slices if s.verb == "all_gather"]
    assert len(gathers) == 2 * len(once)
    ahead = at(stage=3, overlap=True, prefetch=True)
    assert spent(ahead, "wait") < spent(ahead, "all_gather", "reduce_scatter") / 3
    peaks = [at(stage=stage).peak(0) for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)


# --- From Python to the page ---


def own_trace() -> Trace:
    """Two ranks and every kind of thing."""
    code = "minizero/zero/stage1.py#ZeRO1.reduce#yield comm.reduce_scatter("
    return Trace(
        2,
        [
            Slice(
                r, lane, 0.001 * r + 2e-4 * i, 0.001 * r + 9e-4 * i, *what, source=code
            )
            for r in (0, 1)
            for i, (lane, *what) in enumerate(
                (
                    ("compute", "release", "a", 0, -1),
                    ("gather", "all_gather", "a", 4096, 0),
                    ("reduce", "reduce_scatter", "b & c", 123_456_789, 1),
                )
            )
        ],
        [
            Moment(r, 1e-4 * i, (Change("device", "gradients", n, ""),))
            for r in (0, 1)
            for i, n in enumerate((5000, 7, -5007))
        ],
    )


def wanted(trace: Trace, tick: float) -> dict[str, Any]:
    def ticks(time: float) -> int:
        return round(time / tick)

    of = range(trace.ranks)
    alike = {s.rank for s in trace.slices} == {0}
    ranks = [(r, s) for s in trace.slices for r in (of if alike else [s.rank])]
    changed = [(r, m) for m in trace.moments for r in (of if alike else [m.rank])]
    ends = [ticks(s.end) for _, s in ranks] + [ticks(m.time) for _, m in changed]
    return {
        "ranks": trace.ranks,
        "total": max(ends),
        "slices": sorted(
            [
                r,
                s.lane,
                ticks(s.begin),
                ticks(s.end),
                s.verb,
                s.unit,
                s.nbytes,
                s.source,
            ]
            for r, s in ranks
        ),
        "moments": sorted(
            [
                r,
                ticks(m.time),
                [[c.place, c.category, c.unit, c.nbytes] for c in m.changes],
            ]
            for r, m in changed
        ),
    }


def found(told: dict[str, Any]) -> dict[str, Any]:
    """As `wanted`, and calls are numbered in order on each rank."""
    calls = [s.pop(7) for s in told["slices"]]
    for rank in range(told["ranks"]):
        own = zip(told["slices"], calls, strict=True)
        numbers = [call for s, call in own if s[0] == rank and call >= 0]
        assert numbers == list(range(len(numbers)))
    return told | {k: sorted(told[k]) for k in ("slices", "moments")}


def test_every_step_arrives_in_the_page(browser: Any, show: Show) -> None:
    keys = {at.key: at for at in settings()}
    script = f"(key) => ({TOLD})(unpack(steps.tables, steps.traces[key]))"
    source = f"{SOURCE}\nconst steps = {json.dumps(all_steps())};"
    told = in_page(browser, show, source, script, *keys)
    for one, at in zip(told, keys.values(), strict=True):
        assert found(one) == wanted(simulated(at), TICK)
    get = "(s) => settingOf((name) => s[name])"
    states = [at._asdict() for at in keys.values()]
    assert in_page(browser, show, SOURCE, get, *states) == list(keys)


def test_recorded_and_exported_traces_arrive(browser: Any, show: Show) -> None:
    trace = own_trace()
    pack = Pack(1e-6)
    one = {"packed": pack.add(trace), "tables": pack.tables()}
    script = f"(one) => ({TOLD})(unpack(one.tables, one.packed))"
    (told,) = in_page(browser, show, SOURCE, script, one)
    assert found(told) == wanted(trace, 1e-6)
    script = f"(file) => ({TOLD})(fromChrome(file))"
    (told,) = in_page(browser, show, SOURCE, script, trace.chrome())
    assert found(told) == wanted(trace, 1e-6)


def test_time_is_lost_to_what_a_chapter_explains(browser: Any, show: Show) -> None:
    """A wait is for the rank that came last until it has come, then for the link."""
    row = (
        ("compute", 0, 10, "forward", "a"),
        ("reduce", 10, 40, "all_reduce", "a"),
        ("compute", 10, 12, "launch", "a"),
        ("compute", 15, 40, "wait", "a"),
    )
    late = [(lane, b + 20, e + 20 * (lane != "reduce"), *s) for lane, b, e, *s in row]
    ranks = enumerate((row, late, row[:1]))
    slices = [
        Slice(r, lane, 1e-3 * b, 1e-3 * e, *what, call=0 if lane == "reduce" else -1)
        for r, every in ranks
        for lane, b, e, *what in every
    ]
    script = "(file) => ((t) => [t.ranks, lost(t, 0)])(fromChrome(file))"
    ((ranks, lost),) = in_page(browser, show, SOURCE, script, Trace(2, slices).chrome())
    assert ranks == 2
    assert {kind: ms for kind, *ms in lost} == {
        "late": [15_000, 0], "reduce": [10_000, 0], "idle": [3_000, 0],
        "launch": [2_000, 0],
    }  # fmt: skip


# --- In a browser ---


def test_chapter_shows_what_it_is_about(browser: Any, show: Show) -> None:
    """A part of the figure, the point marked where it is meant; the rest on request."""
    shown = ["lanes", "curve", "gradients", "stage", "zoom"]
    how = {"stage": 2, "overlap": False, "moment": 0.6, "shown": shown}
    widget = Timeline(**how, point="here it is")
    (root,) = show(widget.static_html())

    def seen(query: str) -> int:
        return sum(e.is_displayed() for e in root.find_elements("css selector", query))

    assert (seen("select"), seen(".blocks"), seen(".phases")) == (2, 0, 1)
    trace = simulated(widget.setting())
    slices = root.find_elements("css selector", ".lanes rect.s")
    assert len(slices) == sum(s.end > s.begin for s in trace.slices)
    assert seen(".point") == 1 and "here it is" in find(root, ".lanes").text
    selects = root.find_elements("css selector", "select")
    plan, zoom = (one for one in selects if one.is_displayed())
    zoom.send_keys("4")  # the third quarter of the axis
    assert 0 < len(root.find_elements("css selector", ".lanes rect.s")) < len(slices)
    assert seen(".point") == 1
    plan.send_keys("ZeRO-1")
    assert seen(".point") == 0  # it is said of ZeRO-2
    find(root, ".chart > button").click()
    assert (seen("select"), seen(".blocks"), seen(".phases")) == (6, 1, 2)
    assert not root.find_elements("css selector", ".chart > button")


PROSE = """<p>First <span class="timeline-word">gather</span>, then
<span class="timeline-word">releases</span>.</p>"""


def moment(root: Any) -> float:
    return float(find(root, ".scrub").get_property("value"))


def code(root: Any) -> str:
    return str(find(root, ".code").text)


def test_keyboard(browser: Any, show: Show) -> None:
    (root,) = show(PROSE, Timeline(moment=0).static_html())
    assert not root.find_elements("css selector", ".code a")
    find(root, ".scrub").send_keys(Keys.ARROW_RIGHT)
    assert moment(root) == 0.001
    phases = root.find_elements("css selector", ".phases [aria-current]")
    names = " ".join(one.text for one in phases)
    assert names == "gather compute release reduce update"
    for one in phases:
        one.send_keys(Keys.ENTER)
        assert one.get_dom_attribute("aria-current") == "true"
    assert "update root, rank 0" in code(root)
    find(root, "[aria-label='one event back']").send_keys(Keys.ENTER)
    assert "wait" in code(root) or "reduce-scatter" in code(root)
    gather, release = browser.find_elements("class name", "timeline-word")
    gather.send_keys(Keys.ENTER)
    assert "all-gather" in code(root)
    assert "lit" in gather.get_dom_attribute("class")
    release.send_keys(" ")
    assert code(root).startswith("release block 0, rank 0, ")
    assert "resize_(0)" in code(root)
    assert "lit" in release.get_dom_attribute("class")


def test_pointer(browser: Any, show: Show) -> None:
    """In the book, which has a page of each source, the code is a link."""
    book = "<script>document.documentElement.dataset.content_root = '../'</script>"
    (root,) = show(book, Timeline(moment=0).static_html(), width=768)
    slices = root.find_elements("css selector", ".lanes rect.s")
    trace = simulated(Timeline().setting())
    assert len(slices) == 4 * sum(s.end > s.begin for s in trace.slices)
    widths = browser.execute_script(
        "return arguments[0].map((e) => +e.getAttribute('width'))", slices
    )
    wide = slices[widths.index(max(widths))]
    ActionChains(browser).move_to_element(wide).perform()
    assert "lit" in wide.get_dom_attribute("class")
    assert code(root).startswith("backward block") and "scale_loss(loss)" in code(root)
    link = find(root, ".code a").get_dom_attribute("href")
    assert link == "../source/minizero/zero/data_parallel.py.html#DataParallel.backward"
    reduce = find(root, ".lanes rect.s[fill='#ECAB25']")
    ActionChains(browser).move_to_element(reduce).perform()
    sent = {s.nbytes for s in trace.slices if s.verb == "reduce_scatter"}
    assert f"{max(sent) / 1e6:.0f}" in code(root).split(" MB")[0]
    assert len(root.find_elements("css selector", ".arrow")) == 4 * 3
    assert len(root.find_elements("css selector", ".blocks .lit")) == 1
    assert moment(root) == 0
    ActionChains(browser).move_to_element(wide).click_and_hold().release().perform()
    middle = wide.rect["x"] + wide.rect["width"] / 2
    lanes = find(root, ".lanes").rect
    share = (middle - lanes["x"] - 66) / (lanes["width"] - 72)
    # the axis is that of the longest of the four plans, whose ends are marked
    ends = [line(Setting(stage, True, stage == 3)).duration for stage in range(4)]
    assert moment(root) == pytest.approx(share * max(ends) / ends[3], abs=0.003)
    text = find(root, ".lanes").text
    assert f"data parallel ends, {short(round(1e3 * ends[0], 2))} ms" in text


def test_own_trace_is_drawn_here(browser: Any, show: Show, tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 0, "tid": 1, "name": "a", "ts": 1, "dur": 1}
    timeless = {k: v for k, v in event.items() if k != "ts"}
    many = [event | {"ts": 60_000 - i} for i in range(60_000)]
    odd = event | {"args": {"source": 5, "unit": 8, "peers": 1}}
    bad = " is no trace that can be drawn: "
    opened = [
        ('{"loss": 1}', f"{bad}it has no traceEvents. "),
        ("3", f"{bad}it has no traceEvents. "),
        (json.dumps([event])[:-9], f"{bad}Unterminated string in JSON"),
        (json.dumps([timeless]), f"{bad}an event of it has no time, a number of "),
        (json.dumps([event | {"dur": "long"}]), f"{bad}an event of it has no time"),
        (json.dumps(many), ": 50000 slices of 1 rank. The last 10000 events are left"),
        (json.dumps([odd]), ": 1 slice of 1 rank. At 0 ms of 0 ms"),
        (json.dumps(own_trace().chrome()), ": 6 slices of 2 ranks. At 2.8 ms of 2.8"),
    ]
    (root,) = show(Timeline(moment=1).static_html())
    words = find(root, ".words")
    for i, (text, said) in enumerate(opened):
        path = tmp_path / f"run{i}.json"
        path.write_text(text)
        find(root, ".open input").send_keys(str(path))
        until(browser, lambda name=path.name: words.text.startswith(name))
        assert words.text.startswith(path.name + said)
    assert len(root.find_elements("css selector", ".lanes rect.s")) == 4
    plan, _, source = map(Select, root.find_elements("css selector", "select")[:3])
    assert not plan.options[0].is_enabled() or not find(root, "select").is_enabled()
    assert source.first_selected_option.text == "yours"
    source.select_by_visible_text("simulated")
    assert not words.text.startswith(path.name)
    assert not source.options[-1].is_enabled()


def test_hang_is_drawn_with_who_waits_for_whom(
    browser: Any, show: Show, tmp_path: Path
) -> None:
    """Of the parts that its ranks have left; of one alone it is known whose it is."""
    every = own_trace().slices
    kept = [s for s in every if not (s.rank == 0 and s.verb == "reduce_scatter")]
    parts = [tmp_path / f"run.json.rank{r}" for r in (0, 1)]
    for r, path in enumerate(parts):
        mine = [s for s in kept if s.rank == r]
        path.write_text(json.dumps(Trace(2, mine).chrome()))
    (root,) = show(Timeline(moment=1, rank=1).static_html())
    words, of = find(root, ".words"), root.find_elements("css selector", "select")[3]
    for files, many, why in (
        (parts, "5", "It waits for rank 0, which made no such call. "),
        (parts[1:], "3", "It needs rank 0, whose part is not here. "),
    ):
        find(root, ".open input").send_keys("\n".join(map(str, files)))
        start = f"{', '.join(path.name for path in files)}: {many} slices of 2 ranks. "
        until(browser, lambda start=start: words.text.startswith(start))
        find(root, "[aria-label='to the next reduce']").click()
        assert code(root).startswith("reduce-scatter b & c, rank 1, ")
        assert why in code(root)
        assert of.get_property("selectedIndex") == 1
        browser.execute_script(
            "arguments[0].selectedIndex = 0;"
            "arguments[0].dispatchEvent(new Event('change'))",
            of,
        )  # the part that follows is not of this rank


@pytest.mark.parametrize("calm", [False, True])
def test_it_plays(browser: Any, show: Show, calm: bool) -> None:
    (root,) = show(Timeline(moment=0).static_html())
    value = "reduce" if calm else "no-preference"
    media = {"features": [{"name": "prefers-reduced-motion", "value": value}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        play = find(root, "[aria-label=play]")
        play.click()
        assert play.text == "Pause"
        there = until(browser, lambda: moment(root))
        if calm:  # from event to event
            slices = simulated(Timeline().setting()).slices
            total = max(s.end for s in slices)
            assert any(abs(there - s.begin / total) < 0.001 for s in slices)
        play.click()
        assert play.text == "Play"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


SETTINGS = """const [root] = arguments;
  const [plan, offload, step] = root.querySelectorAll("select");
  const set = (control, value) => {
    control.selectedIndex = value;
    control.dispatchEvent(new Event("change"));
  };
  const heights = new Set();
  for (const [stage, place, source] of [[1, 2, 0], [0, 0, 0], [1, 1, 0], [2, 1, 0],
      [3, 0, 1], [3, 2, 0]]) {
    set(step, source);
    if (!source) set(plan, stage);
    if (!offload.disabled) set(offload, place);
    for (let i = 0; i <= 40; i++) {
      const scrub = root.querySelector(".scrub");
      scrub.value = i / 40;
      scrub.dispatchEvent(new Event("input"));
      const { top } = root.querySelector(".words + div").getBoundingClientRect();
      heights.add(top - root.querySelector(".words").getBoundingClientRect().top);
    }
  }
  return [...heights]"""
"""How far below the words that tell what a rank does stands what follows them."""


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_moves_while_it_plays(browser: Any, show: Show, width: int) -> None:
    """Under any plan and at any moment, whatever is set."""
    (root,) = show(Timeline().static_html(), width=width)
    before = find(root, ".box").size["height"]
    assert len(browser.execute_script(SETTINGS, root)) == 1
    assert find(root, ".box").size["height"] == before
