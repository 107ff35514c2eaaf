"""`estimate` gives the published figures; the tracker counts what is there."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from minizero import Plan, Tracker, estimate, estimate_activations, see_memory_usage
from minizero.lab.toygpu import ToyGPU
from minizero.lab.toymachine import TOY
from minizero.memory import host_empty, labels
from minizero.memory.labels import host_memory, label, labelled_bytes, on_host
from minizero.scale.cost import Costs, Job
from minizero.scale.shapes import Shape

# Rajbhandari et al. 2020 (arXiv:1910.02054v3), table 1: GB a device for mixed
# precision Adam, by model and data-parallel degree: P_os, P_os+g, P_os+g+p
TABLE_1 = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
CELLS = [
    (n, ranks, stage, row[stage - 1])
    for n, rows in TABLE_1.items()
    for ranks, row in rows.items()
    for stage in (1, 2, 3)
]


@pytest.mark.parametrize(("n", "ranks", "stage", "printed"), CELLS)
def test_table_1_of_the_zero_paper(
    n: float, ranks: int, stage: int, printed: str
) -> None:
    """Within one unit of the last printed digit: some cells are truncated."""
    ours = estimate(n, ranks, stage).total / 1e9
    digits = len(printed.partition(".")[2])
    assert abs(ours - float(printed)) < 10**-digits
    exact = f"{ours:.{digits}f}"
    truncated = str(int(ours)) if digits == 0 else exact
    assert printed in (exact, truncated) or f"{ours + 1e-9:.{digits}f}" == printed


def test_offload_moves_bytes_and_keeps_their_sum() -> None:
    plain = estimate(7e9, 8, 3)
    moved = estimate(7e9, 8, 3, offload_optimizer="cpu", offload_param="nvme")
    assert moved.total == 0
    assert moved.host.optimizer == plain.optimizer
    assert moved.host.gradients == plain.gradients
    assert moved.disk.parameters == plain.parameters
    assert moved.host.total + moved.disk.total == plain.total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"stage": True}, "not True"),
        ({"precision": "fp8"}, "one of fp32, bf16, fp16, not 'fp8'"),
        ({"optimizer": "lion"}, "one of adam, momentum, sgd, not 'lion'"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "must be sharded"),
        ({"stage": 2, "offload_param": "cpu"}, "must be sharded"),
        ({"stage": 3, "offload_param": "tape"}, "device, cpu, nvme, not 'tape'"),
        ({"stage": Plan.stage(3), "offload_param": "cpu"}, "to Plan.stage, not here"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    arguments = {"n_params": 1e9, "world_size": 8, "stage": 3, **options}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        estimate(**arguments)  # type: ignore[arg-type]


# Korthikanti et al. 2022 (arXiv:2205.05198), eq. 2, less two dropout masks of a byte
# an element; their 22B model: 48 layers, h = 6144, a = 64, s = 2048, b = 4
@pytest.mark.parametrize(
    ("checkpointing", "attention", "a_layer"),
    [("none", "unfused", 34 + 5 * 64 * 2048 / 6144 - 2), ("none", "fused", 32)]
    + [(how, attention, kept) for how, kept in (("selective", 22), ("full", 2))
       for attention in ("fused", "unfused")],
)  # fmt: skip
def test_activations(checkpointing: str, attention: str, a_layer: float) -> None:
    got = estimate_activations(48, 6144, 64, 2048, 4, checkpointing, attention)
    assert got == pytest.approx(48 * 2048 * 4 * 6144 * a_layer, rel=1e-12)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_the_planner_counts_the_same_activations(how: str) -> None:
    """And 4 bytes a token and head, which fused attention keeps."""
    job = Job(Shape(32, 4096, 32, 32_000), TOY, 1, 1, 2048)
    costs = Costs(job, tokens=2048)
    rows = 4 * 2048 * 32 * (how != "full")
    assert costs.saved(how) == estimate_activations(1, 4096, 32, 2048, 1, how) + rows


def test_tracker_counts_storages_to_the_byte() -> None:
    with Tracker() as tracker:
        a = torch.zeros(1000)
        view = a[10:20]
        assert tracker.live["activations"] == 4000
        del a
        assert tracker.live["activations"] == 4000  # the view holds the storage
        label(view, "buffers")
        assert tracker.live["activations"] == 0 and tracker.live["buffers"] == 4000
        view.untyped_storage().resize_(0)
        assert tracker.total == 0 and tracker.peak == 4000
        b = torch.zeros(3, dtype=torch.bfloat16)
        tracker.mark("here", "unit")
        assert tracker.samples[-1].live["activations"] == 6
    assert (tracker.samples[-1].event, tracker.samples[-1].unit) == ("here", "unit")
    del b


def test_labels_do_not_keep_memory() -> None:
    gc.collect()
    before = labelled_bytes()["buffers"]
    t = label(torch.zeros(100), "buffers")
    assert labelled_bytes()["buffers"] == before + 400
    del t
    assert labelled_bytes()["buffers"] == before
    with pytest.raises(ValueError, match="category must be one of"):
        label(torch.zeros(1), "weights")
    with pytest.raises(ValueError, match="device, cpu, not 'host'"):
        labelled_bytes("host")


def test_see_memory_usage(capsys: pytest.CaptureFixture[str]) -> None:
    t = label(torch.zeros(10**6), "parameters")
    see_memory_usage("quiet")
    see_memory_usage("after forward", force=True)
    out = capsys.readouterr().out
    assert "quiet" not in out
    assert out.startswith("after forward: parameters ")
    del t


def test_unlabelled_memory_of_the_cpu_is_the_hosts_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands for a device's memory only where everything is on the CPU."""
    alone = torch.zeros(10)
    assert not on_host(alone)
    monkeypatch.setattr(labels, "_on_gpu", {"a parameter on a GPU": True})
    with Tracker() as tracker:
        batch = torch.zeros(1000)
        said = label(torch.zeros(10), "buffers", on="device")
        assert on_host(alone) and on_host(batch) and not on_host(said)
        assert tracker.host["activations"] == 4000
        assert tracker.live["activations"] == 0


def test_page_locked_memory_takes_the_bytes_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Registered from a page on, and until the tensor and its views are gone."""
    calls: list[tuple[str, int]] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda at, n, flags: calls.append((f"lock {n}", at)) or 0,
        cudaHostUnregister=lambda at: calls.append(("unlock", at)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("wait", 0)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    shard = host_empty((3, 11), torch.bfloat16, "gradients").fill_(2)
    at, row = shard.data_ptr(), shard[1]
    assert at % 4096 == 0 and on_host(shard)
    assert shard.untyped_storage().nbytes() == 66
    del shard
    assert calls == [("lock 66", at)] and row.sum() == 22
    del row
    assert calls[1:] == [("wait", 0), ("unlock", at)]
    assert host_empty((0,), torch.float32, "buffers").numel() == 0
    cudart.cudaHostRegister = lambda *_: 2
    with pytest.raises(RuntimeError, match="could not be page-locked"):
        host_empty((5,), torch.float32, "gradients")


def test_host_memory_is_counted_apart() -> None:
    with Tracker() as tracker:
        with host_memory():
            state = label(torch.zeros(1000), "optimizer")
        weight = label(torch.zeros(100), "parameters")
        weight.copy_(state[:100])
        twin = label(torch.zeros_like(state), "optimizer")  # made of host memory
        assert on_host(twin) and not on_host(weight)
        mixed = weight + state[:100]
        assert tracker.live["optimizer"] == 0
        assert tracker.host["optimizer"] == 8000
        assert tracker.total == tracker.peak == weight.nbytes + mixed.nbytes
        label(twin, "optimizer", on="device")
        assert tracker.live["optimizer"] == tracker.host["optimizer"] == 4000
        assert tracker.host_peak == 8000
        assert labelled_bytes("cpu")["optimizer"] == 4000
        del state, twin
        assert not any(tracker.host.values())


def test_host_memory_is_outside_the_budget() -> None:
    with ToyGPU(1000) as gpu:
        with host_memory():
            state = torch.zeros(1000)
        with pytest.raises(torch.OutOfMemoryError):
            label(state, "optimizer", on="device")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1000)
        assert gpu.peak == 0
