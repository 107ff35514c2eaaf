"""The main job: `python -m minizero train`, alone and under torchrun."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from conftest import Run
from safetensors.torch import load_file

from minizero.__main__ import main
from minizero.lab.models.gpt import GPT, GPTConfig

SMALL = ["--model", "0.1m", "--steps", "6", "--batch", "6", "--sequence", "32"]


def run(*arguments: object, ends: int = 0) -> str:
    """The command in this process: what it printed, or the sentence of its error."""
    out, said = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        status = main([str(word) for word in arguments])
    assert status == ends and "Traceback" not in said.getvalue(), said.getvalue()
    return said.getvalue() if ends else out.getvalue()


def report(folder: Path) -> dict[str, object]:
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def stage_3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("stage3")
    return folder, run("train", "--stage", 3, "--ranks", 2, *SMALL, "--out", folder)


def test_it_proves_itself(stage_3: tuple[Path, str]) -> None:
    folder, out = stage_3
    assert out.count("yes") == 4 and "NO" not in out
    assert (folder / "loss.png").stat().st_size > 5000
    seen = report(folder)
    losses = seen["losses"]
    assert isinstance(losses, list) and len(losses) == 6 and losses[-1] < losses[0]


def test_weights_load_into_the_plain_model(stage_3: tuple[Path, str]) -> None:
    path = stage_3[0] / "weights.safetensors"
    # everybody who may read the report may read the weights
    assert path.stat().st_mode == (stage_3[0] / "report.json").stat().st_mode
    weights = load_file(path)
    model = GPT(GPTConfig.named("0.1m"))
    model.load_state_dict(weights)
    assert torch.equal(model.head.weight, weights["tokens.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        "--stage 1 --precision fp16 --steps 7 --offload-optimizer cpu",
        "--precision bf16 --offload-optimizer nvme --offload-param nvme --overlap",
    ],
)
def test_other_precisions_and_places(options: str, tmp_path: Path) -> None:
    """Bytes equal the formula there too; fp16 leaves steps out at first."""
    files, words = tmp_path / "files", options.split()
    words += ["--nvme", str(files), "--out", str(tmp_path)]
    out = run("train", "--ranks", 2, *SMALL, *words)
    assert out.count("yes") >= 4 and "NO" not in out
    assert not files.exists() or not list(files.iterdir())
    skipped = report(tmp_path)["skipped_steps"]
    assert isinstance(skipped, int) and (skipped > 0) == ("fp16" in options)


@pytest.mark.thorough
def test_another_stage_under_torchrun_learns_the_same(
    stage_3: tuple[Path, str], tmp_path: Path, tool: Run
) -> None:
    words = "--standalone --nproc-per-node 2 -m minizero train --stage 0".split()
    out = tool("torchrun", *words, *SMALL, "--out", tmp_path)
    assert out.count("yes") == 4 and "NO" not in out
    a, b = report(tmp_path), report(stage_3[0])
    for key in ("losses", "valid_loss", "sample"):
        assert a[key] == b[key], key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "4"], "stage must be 0, 1, 2 or 3, not 4"),
        ([], "invalid literal for int() with base 10: 'many'"),
        (["--ranks", "0"], "ranks must be at least 1, not 0"),
        (["--model", "huge"], "no model size 'huge'"),
        (["--steps", "0"], "steps must be at least 1, not 0"),
        (["--batch", "6", "--ranks", "4"], "does not divide over 4 ranks"),
        (["--sequence", "0"], "sequence must be between 1 and"),
        (["--precision", "fp8"], "precision must be one of fp32, bf16, fp16"),
        (["--offload-param", "cpu", "--stage", "2"], "must be sharded"),
        (["--lr", "0"], "lr and clip must be above 0"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "empty"], "empty"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIZERO_RANKS", "many")
    Path("empty").write_text("")
    ranks = [] if "many" in message else ["--ranks", "2"]
    (line,) = run("train", *ranks, *arguments, "--out", "out", ends=2).splitlines()
    assert line.startswith("error: ") and message in line
    assert not Path("out").exists()


@pytest.mark.thorough
def test_a_job_goes_on_under_another_plan_with_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its last checkpoint; its losses are those of the run that did not stop."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # this process is the only rank
    job = ["train", *SMALL[:2], *SMALL[4:], "--out", tmp_path, "--save-every", 2]
    run(*job, "--steps", 3)
    before = report(tmp_path)["losses"]
    for words, sentence in (
        (("--steps", 3), "go on from them with --resume"),
        (("--steps", 2, "--resume"), "give more with --steps"),
        (("--steps", 3, "--resume", "--lr", 1), "has lr 0.002, not 1.0"),
    ):
        assert sentence in run(*job, *words, ends=2)
    trace = tmp_path / "trace.json"
    run(*job, "--steps", 3, "--resume", "--stage", 1, "--trace", trace)
    assert report(tmp_path)["losses"] == before
    assert json.loads(trace.read_text())["traceEvents"]
    # more steps than it was begun with: from the next update on at their rate
    found = []
    for steps in (4, 5):
        run(*job, "--steps", steps, "--resume")
        found.append(report(tmp_path)["losses"])
        assert len(found[-1]) == steps and found[-1][:3] == before
        saves = tmp_path / "checkpoints"
        shutil.rmtree(saves / "step-4")
        (saves / "latest").unlink()
    assert found[0][3] != found[1][3]


@pytest.mark.thorough
def test_ctrl_c_ends_in_one_word(tmp_path: Path) -> None:
    words = ["train", "--ranks", "2", *SMALL[:2], "--steps", "100000", "--out", "."]
    words += ["--save-every", "5"]
    job = subprocess.Popen(
        [sys.executable, "-m", "minizero", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "checkpoints" / "latest").exists():  # it trains
        assert job.poll() is None
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)
    _, rest = job.communicate(timeout=120)
    assert job.returncode == 130
    assert "Traceback" not in rest and rest.rstrip().endswith("interrupted")


def test_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--params", "7e9", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    totals = [line.split()[-1] for line in out.splitlines()[2:]]
    assert totals == ["112.00", "38.50", "26.25", "14.00"]
    assert main(["estimate", "--params", "-1", "--ranks", "8"]) == 2
    assert "--params is -1" in capsys.readouterr().err
