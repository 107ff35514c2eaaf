"""What several test files share."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minizero.ranks import Pool

# Where there is no GPU, Triton interprets kernels if it finds this at its import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts a command in the background with interrupts ignored, and what a test
# starts would inherit that; some tests are about interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Gloo's thread wakes for each message, and spins as long as another thread holds its
# connection's lock. Where ranks share few cores, it often takes the core from the very
# thread that holds it. As a batch thread, which what is started here inherits, it waits
# its turn: on two cores ranks talk two to three times as fast.
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Several test files run at a time. With a thread a core for each, threads that spin
# would keep the cores from those that compute, and some tests take nine times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes for it
    torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "notebooks"))
from local_kernel import is_thorough  # noqa: E402  and how notebooks get their kernels

LOCAL = re.compile("(file|data|blob|chrome|chrome-untrusted):")

Run = Callable[..., str]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """What earlier files have left in reference cycles would be counted as live.

    An engine made in this process makes it a rank, alone in its group; a dry run, which
    makes it one of many, would refuse.
    """
    gc.collect()
    gc.freeze()  # what is there now need not be looked at by each collection
    yield
    gc.unfreeze()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Run:
    """Runs a program of this environment; a failure shows what it printed."""

    def run(name: str, *arguments: object, cwd: Path = ROOT) -> str:
        program = Path(sys.executable).with_name(name)
        done = subprocess.run(
            [program, *map(str, arguments)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            pytest.fail(f"{name} {' '.join(map(str, arguments))}\n{done.stdout}")
        return done.stdout

    return run


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run_script(
    folder: Path, text: str, *command: str
) -> subprocess.CompletedProcess[str]:
    """What a program prints, run by Python or by another command."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [*(command or [sys.executable]), str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="every test: those marked `thorough` too, and each on 1 to 4 ranks",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Notebooks first; without what is `thorough`, unless asked for everything.

    A notebook takes a minute and cannot be divided, so none may begin last.
    """
    items.sort(key=lambda item: item.path.suffix != ".ipynb")
    if config.getoption("--all"):
        return
    out = [i for i in items if i.get_closest_marker("thorough") or is_thorough(i)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test on `pool` runs on 2 ranks; with --all on 1 to 4, or its file's RANKS."""
    if "pool" in metafunc.fixturenames and not hasattr(metafunc.module, "pool"):
        ranks = getattr(metafunc.module, "RANKS", (1, 2, 3, 4))
        if not metafunc.config.getoption("--all"):
            ranks = tuple(n for n in ranks if n == 2) or ranks[:1]
        ids = "{} ranks".format
        metafunc.parametrize("pool", ranks, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that uses a pool and does not ask for it runs on each of its ranks."""
    names = inspect.signature(pyfuncitem.obj).parameters
    for name, pool in pyfuncitem.funcargs.items():
        if isinstance(pool, Pool) and name not in names:
            pool.run(pyfuncitem.obj, **{n: pyfuncitem.funcargs[n] for n in names})
            return True
    return None


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Two network namespaces with a wire between them: 10.213.9.1 and 10.213.9.2."""
    names, wires = ([f"mz{os.getpid()}{x}{i}" for i in range(2)] for x in "nw")
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {wires[0]} type veth peer name {wires[1]}"]
    for i, (name, wire) in enumerate(zip(names, wires, strict=True), 1):
        commands += [
            f"link set {wire} netns {name}",
            f"-n {name} link set {wire} name wire",
            f"-n {name} addr add 10.213.9.{i}/24 dev wire",
            f"-n {name} link set wire up",
            f"-n {name} link set lo up",
        ]
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program `ip` (iproute2)")
    try:
        for command in commands:
            done = ip(command)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip(f"netns delete {name}")
        ip(f"link delete {wires[0]}")


def ip(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium that can reach no other host; one for all test files."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("Chromium and chromedriver are not both on the PATH")
    from selenium import webdriver

    class Patient(webdriver.Chrome):
        """Waits until a page is complete, which the driver does not always do."""

        def execute(self, command: str, values: Any = None) -> Any:
            answer = super().execute(command, values)
            if command in ("get", "refresh"):
                state = "return document.readyState"
                until(self, lambda: self.execute_script(state) == "complete")
            return answer

    flags = "headless=new no-sandbox no-first-run disable-gpu disable-dev-shm-usage "
    flags += "disable-background-networking disable-component-update disable-sync"
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    alone = "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*flags.split(), profile, alone):
        options.add_argument(f"--{flag}")
    logs = {"browser": "ALL", "performance": "ALL"}
    options.set_capability("goog:loggingPrefs", logs)
    service = webdriver.ChromeService(chromedriver)
    driver = Patient(options=options, service=service)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def requests(browser: Any) -> list[str]:
    """The addresses that were asked for since this was called last."""
    log = browser.get_log("performance")
    return [
        event["params"]["request"]["url"]
        for event in (json.loads(entry["message"])["message"] for entry in log)
        if event["method"] == "Network.requestWillBeSent"
    ]


Show = Callable[..., list[Any]]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Opens a page of explorables from a file and gives their shadow roots.

    Whatever is done there, nothing is asked of anybody, and the console has no error.
    """
    requests(browser)

    def open_page(
        *pieces: str, theme: str = "light", width: int = 720, style: str = ""
    ) -> list[Any]:
        body = "".join(f'<div class="text_html">{piece}</div>' for piece in pieces)
        head = f'<!doctype html><html data-theme="{theme}"><meta charset="utf-8">'
        page = tmp_path / "page.html"
        page.write_text(f"{head}<style>body {{ margin: 0 }} {style}</style>{body}")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.as_uri())
        hosts = browser.find_elements("css selector", ".explorable-frame")
        return [host.shadow_root for host in hosts]

    yield open_page
    browser.execute_script("localStorage.clear()")  # pages keep the reader's model
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    errors = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert errors == []
    assert not [url for url in requests(browser) if not LOCAL.match(url)]


def until(browser: Any, condition: Callable[[], Any]) -> Any:
    """Wait for what a page or a server does in its own time."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 120).until(lambda _: condition())


def find(root: Any, selector: str) -> Any:
    return root.find_element("css selector", selector)


LIVE = """
<div id="cell"></div>
<script type="module">
%s
{
const state = %s;
const listeners = {};
window.sent = [];
window.receive = (name, value) => {
  state[name] = value;
  listeners[`change:${name}`].forEach((listener) => listener());
};
const model = {
  get: (name) => state[name],
  set: (name, value) => { sent.push([name, value]); receive(name, value); },
  save_changes: () => sent.push("saved"),
  on: (names, listener) => names.split(" ").forEach(
    (name) => (listeners[name] ??= []).push(listener)),
  off: (names, listener) => names.split(" ").forEach((name) => {
    listeners[name] = listeners[name].filter((other) => other !== listener); }),
};
window.clean = render({ model, el: document.getElementById("cell") });
window.listening = () => Object.values(listeners).flat().length;
}
</script>
"""
"""Mounts a module on a model that records; its holes: the module and the state."""
