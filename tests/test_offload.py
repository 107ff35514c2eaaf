"""State in host memory: the same numbers, other bytes; and updates that are late.

Equality with data parallelism is in `test_equal`, in every place.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import STATE, Case, Nasty, batches, muon, on_cpu_only, own, plans, same, some
from nasty import name_of as name
from test_equal import OPTIMIZERS, train
from torch import Tensor, nn

from minizero import Delayed, NVMe, Offload, Plan, Tracker, estimate, parallelize, zero
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.plots.offload import crossing
from minizero.memory import Placement
from minizero.memory.labels import aligned
from minizero.memory.plan import PRECISIONS as BYTES
from minizero.precision import LossScale, MixedPrecision
from minizero.ranks import Pool, device, rank
from minizero.zero import Storage

RANKS = (2, 3)  # with --all
CONFIG = GPTConfig(layers=3, hidden=24, heads=2, sequence=16, vocabulary=50)
PRECISIONS: dict[str, Callable[[], Any]] = {
    "fp32": lambda: None,
    "bf16": MixedPrecision,
}


PLANS = plans("device", "cpu")
FULL = Plan.stage(3, "cpu", "cpu")
DISK = Plan.stage(3, "nvme", "nvme")
DELAYED = [Plan.stage(1, "cpu"), Plan.stage(2, "cpu"), FULL]


def wrap(plan: Plan, storage: Callable[[Plan], Storage] | None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = storage(plan) if storage else None
    return parallelize(model, optimizer, plan, storage=kept, **options)


def one_step(net: Any) -> None:
    net.backward(net(torch.ones(4)).sum())
    net.step()


# --- bytes --------------------------------------------------------------------


def measure(
    plan: Plan, precision: str, make: Callable[[Plan], Offload]
) -> dict[str, Any]:
    """Train a GPT for two steps; what is stored, what crossed in the second."""
    gc.collect()  # models of tests before, which hang in reference cycles
    kept = make(plan)
    with Tracker() as seen:
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        mixed = PRECISIONS[precision]()
        net = parallelize(model, optimizer, plan, storage=kept, precision=mixed)
        x = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
        x = x.to(device())
        for _ in range(2):
            down, up = kept.down.nbytes, kept.up.nbytes
            net.backward(net(x, x))
            net.step()
        net.synchronize()
        gc.collect()  # what is freed by now may still hang in cycles
        found = {
            "device": dict(seen.live),
            "cpu": dict(seen.host),
            "crossed": (kept.down.nbytes - down, kept.up.nbytes - up),
            "sizes": [flat.size for flat in net.flats],
            "masters": len(net.trained),
        }
    if isinstance(kept, NVMe):
        found["nvme"] = {c: getattr(kept.on_disk, c) for c in STATE}
        found["fixed"] = kept.buffers.nbytes
        found["file"] = os.fstat(kept.swap.fd).st_size
        kept.close()
    return found


def padded(seen: dict[str, Any], ranks: int) -> int:
    return ranks * sum(seen["sizes"])


def blocks(plan: Plan, precision: str, size: int) -> dict[str, int]:
    """Bytes of the blocks used in turn, by place; `size` of the largest shard."""
    parameter, gradient, _ = BYTES[precision]
    at = plan.optimizer.on
    turn = aligned(parameter * size) * (plan.parameters.on != at)
    turn += aligned(gradient * size) * (plan.gradients.on != at)
    nbytes = {"device": 0, "cpu": 0}
    nbytes[at] += 2 * turn
    nbytes["cpu"] += 2 * aligned(gradient * size) * (plan.gradients.on == "cpu")
    return nbytes


@pytest.mark.parametrize(
    "precision", some(["bf16", "fp32"], lambda name: name == "fp32")
)
def test_bytes(pool: Pool, precision: str) -> None:
    """What is stored and what crosses, in each place, is what the formulas say."""
    for plan in PLANS:
        for seen in pool.run(measure, plan, precision, Offload):
            formula = estimate(padded(seen, pool.size), pool.size, plan, precision)
            # a GPT has one flat buffer a unit
            blocked = blocks(plan, precision, max(seen["sizes"]))
            for where, expected in (("device", formula), ("cpu", formula.host)):
                live, case = seen[where], (name(plan), precision, where)
                small = 4 * seen["masters"] * (where == plan.optimizer.on)
                assert live["parameters"] == expected.parameters, case
                assert live["gradients"] == expected.gradients, case
                # and a step counter of each master
                assert live["optimizer"] == expected.optimizer + small, case
                # one NaN for each placeholder
                assert 0 <= live["buffers"] - blocked[where] <= small, case
            shard = sum(seen["sizes"])
            assert seen["crossed"] == tuple(
                n * shard for n in crossing(plan, precision)
            )


def test_bytes_of_a_delayed_update(two: Pool) -> None:
    """Gradients a second time, and parameters in the optimizer's dtype."""
    for plan in DELAYED:
        for seen in two.run(measure, plan, "fp32", Delayed):
            formula = estimate(padded(seen, 2), 2, plan, precision="fp32")
            shard = 4 * sum(seen["sizes"])
            assert seen["device"]["parameters"] == formula.parameters
            assert seen["device"]["gradients"] == formula.gradients
            assert seen["cpu"]["gradients"] == formula.host.gradients + shard
            states = formula.host.optimizer + 4 * seen["masters"]
            assert seen["cpu"]["optimizer"] == states + shard
            assert seen["device"]["buffers"] == 0


# --- refusals -----------------------------------------------------------------


def twice(make: Callable[[Plan], Storage], **options: Any) -> None:
    for _ in range(2):
        wrap(FULL, make, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Plan.stage(2, None, "cpu"), "must be sharded"),
        (lambda: Placement(False, "cpu"), "must be sharded"),
        (lambda: wrap(FULL, None), "'cpu'.* pass minizero.Offload"),
        (lambda: wrap(Plan.stage(3, "nvme"), Offload), "optimizer on 'nvme'"),
        (lambda: wrap(Plan.stage(3), lambda _: Offload(FULL)), "storage is for Plan"),
        (lambda: twice(cache(Offload)), "another net has this Offload"),
        (lambda: twice(Offload, precision=MixedPrecision()), "has this MixedPrecision"),
        (lambda: Delayed(Plan.stage(3)), "optimizer is on 'device'"),
    ],
)
def test_refusals(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# --- what a script writes -----------------------------------------------------


def written_to(plan: Plan, storage: Callable[[Plan], Storage], precision: str) -> float:
    """A weight that is set by hand after a step, two steps later."""
    net = wrap(plan, storage, precision=PRECISIONS[precision]())
    for step in range(3):
        one_step(net)
        if step == 0:
            net.optimizer.param_groups[0]["lr"] = 0.0
            with zero.GatheredParameters(net.model[0].weight, modifier_rank=0):
                with torch.no_grad():
                    net.model[0].weight.fill_(3.0)
    weights = net.state_dict()
    return float(weights["0.weight"].sum()) if rank() == 0 else 48.0


def test_what_is_written_by_hand_stays(two: Pool, tmp_path: Path) -> None:
    on_disk = partial(NVMe, folder=tmp_path, buffer_size=64)
    for plan, storage, precision in (
        (FULL, Offload, "fp32"),
        (Plan.stage(2, "cpu"), Delayed, "bf16"),
        (DISK, on_disk, "fp32"),
        (Plan.stage(1, "nvme"), on_disk, "bf16"),
    ):
        found = two.run(written_to, plan, storage, precision)
        assert found == [48.0] * 2, (name(plan), storage)


def test_writing_under_a_delayed_update_is_refused() -> None:
    net = wrap(Plan.stage(2, "cpu"), Delayed)
    one_step(net)
    with pytest.raises(RuntimeError, match="while an update was under way"):
        net.refresh()
    net.synchronize()
    net.refresh()


# --- the delayed update -------------------------------------------------------


class Late(Storage):
    """Updates with the gradients, and the options, of the step before."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.kept: dict[Any, Any] = {}

    def step(self, flats: Any, optimizer: Any, precision: Any) -> None:
        groups = optimizer.param_groups
        now = (
            [flat.staged_grad.clone() for flat in flats],
            copy.copy(precision),
            [group["lr"] for group in groups],
        )
        before, self.kept[flats[0]] = self.kept.get(flats[0]), now
        if before is None:
            return
        for flat, grad in zip(flats, before[0], strict=True):
            flat.staged_grad = grad
        for group, rate in zip(groups, before[2], strict=True):
            group["lr"] = rate
        super().step(flats, optimizer, before[1])
        for group, rate in zip(groups, now[2], strict=True):
            group["lr"] = rate


@on_cpu_only
@pytest.mark.parametrize(
    "bf16, make", [(False, muon), (True, nasty.adamw), (True, OPTIMIZERS["sgd"])]
)
def test_delay_is_one_step(two: Pool, tmp_path: Path, bf16: bool, make: Any) -> None:
    """Against an optimizer that keeps each gradient for a step itself.

    In mixed precision the factor of clipping is that of the gradients' step.
    """
    how = {"precision": "bf16" if bf16 else "fp32", "micro": 1 + bf16}
    case = partial(Case, **how, optimizer=make)  # type: ignore[arg-type]
    expected, _ = two.run(train, case(Plan.stage(1), storage=Late), tmp_path)[0]
    at_once, _ = two.run(train, case(Plan.stage(1)), tmp_path)[0]
    assert expected != at_once
    for plan in DELAYED:
        ahead = (10**9, 10**9, 0) if plan is FULL else None
        late = case(plan, storage="Delayed", overlap=ahead)
        assert two.run(train, late, tmp_path)[0][0] == expected, name(plan)


Seen = tuple[list[float], dict[str, Tensor]]


def stepping(plan: Plan, make: Callable[[Plan], Storage], look: bool = False) -> Seen:
    """The learning rate halves after each step; `look` at the weights in between."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    net = parallelize(model, optimizer, plan, storage=make(plan))
    losses = []
    for x, y in batches(5, 1, rows=2):
        loss = net(own(x, 2), own(y, 2))
        net.backward(loss)
        net.step()
        schedule.step()
        if look:
            net.state_dict()
        losses.append(loss.item())
    return losses, net.state_dict()


@on_cpu_only
def test_an_update_keeps_the_options_of_its_step(two: Pool) -> None:
    """And nothing is late where a step waits."""
    got, expected = (
        two.run(stepping, *how)[0] for how in ((FULL, Delayed), (Plan.stage(0), Late))
    )
    assert got[0] == expected[0]
    plan = Plan.stage(2, "cpu")
    losses, weights = two.run(stepping, Plan.stage(2), Storage)[0]
    for late in ((partial(Delayed, start=5),), (Delayed, True)):
        found, ended = two.run(stepping, plan, *late)[0]
        assert found == losses
        assert same(ended, weights)


def skipped(storage: type[Offload]) -> list[Tensor]:
    """The parameters' shards after an update, and a step that is skipped."""
    torch.manual_seed(0)
    model = Nasty()
    plan, precision = Plan.stage(2, "cpu"), MixedPrecision(loss_scale=LossScale())
    options = {"storage": storage(plan), "precision": precision}
    net = parallelize(model, nasty.adamw(nasty.groups(model)), plan, **options)
    for (x, y), factor in zip(batches(2, 1, rows=2), (1, torch.inf), strict=True):
        net.backward(net(own(x, 2), own(y, 2)) * factor)
        net.step()
    assert precision.skipped_steps == 1
    return [flat.shard.clone() for flat in net.flats]


def test_a_delayed_update_arrives_with_a_skipped_step(two: Pool) -> None:
    """It is late by one step, whether or not the next one is skipped."""
    expected, got = two.run(skipped, Offload)[0], two.run(skipped, Delayed)[0]
    assert all(map(torch.equal, expected, got))


def test_an_error_in_the_thread_is_raised_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = wrap(Plan.stage(2, "cpu"), Delayed)
    one_step(net)

    def fails(*args: Any) -> None:
        raise ArithmeticError("the second update fails")

    monkeypatch.setattr(net.storage, "step", fails)
    one_step(net)
    for _ in range(2):  # the net cannot go on
        with pytest.raises(ArithmeticError, match="the second update fails"):
            one_step(net)


# --- a GPU ---------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", [*DELAYED, Plan.stage(3, None, "cpu")], ids=name)
def test_on_a_gpu(plan: Plan) -> None:
    """Through streams and page-locked memory; the two Adams round differently."""

    def losses(storage: Storage | None) -> Tensor:
        torch.manual_seed(0)
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        used = storage.plan if storage else Plan.stage(3)
        net = parallelize(model, optimizer, used, storage=storage)
        x, seen = torch.arange(16)[None], []
        for _ in range(8):
            seen.append(net(x, x))
            net.backward(seen[-1])
            net.clip_grad_norm(1.0)
            net.step()
        return torch.stack(seen).detach()

    got, expected = losses(Offload(plan)), losses(None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
