"""The same bits, whatever is sharded, offloaded, overlapped or recomputed.

A `Case` says how a model is trained that has everything which breaks sharding (see
`nasty`). It is compared with data parallelism in the same arithmetic: losses, norms,
the state of the precision, and weights, bit for bit. A row in `CASES` is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Case, Fails, Nasty, batches, muon, name_of, own, plans, same, some
from torch import Tensor, nn

import minizero
from minizero import Plan, checkpoint
from minizero.ranks import Pool, rank, world_size
from minizero.zero import DataParallel

ALL, NONE, STEPS = 10**9, 0, 6
EVENTS = (
    "overflow",  # in one micro-batch of rank 1
    "healthy",
    "forward fails",
    "overflow",
    "backward fails",
    "abandoned",
    "loaded",  # into a new net, from a checkpoint
    "evaluated",
)


class Nothing(nn.Module):
    """A unit whose only trained parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.trained.sum()


def model() -> Nasty:
    made = Nasty()
    made.blocks.append(Nothing())
    return made


def fail(net: DataParallel, where: str, x: Tensor, y: Tensor) -> None:
    """A step that ends in the middle of its second micro-batch."""

    def hook(_: nn.Module, args: Any) -> Any:
        if where == "forward fails":
            raise RuntimeError("on purpose")
        return (Fails.apply(args[0]),)

    net.backward(net(x, y))
    handle = net.model.blocks[2].register_forward_pre_hook(hook)
    with pytest.raises(RuntimeError, match="on purpose"):
        net.backward(net(x, y))
    handle.remove()
    net.zero_grad()


def train(case: Case, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """What was seen in every step, and the weights."""
    net, seen = case.build(model, folder / "files"), []
    events = EVENTS if case.events else ("healthy",) * STEPS
    data = [(own(x, 2), own(y, 2)) for x, y in batches(len(events), case.micro, rows=2)]
    for step, event in enumerate(events):
        net.model.step = step
        if event == "loaded":
            checkpoint.save(net, folder / "saved", "here")
            net = case.build(model, folder / "files")
            net.model.step = step
            checkpoint.load(net, folder / "saved")
        if event.endswith("fails"):
            fail(net, event, *data[0])
        if event == "abandoned":
            net.backward(net(*data[0]))
            net.zero_grad()
            net.step()  # by gradients of zero
        if event == "evaluated":
            with torch.no_grad():
                seen.append(net(*data[0]).item())
        for micro in range(case.micro):
            postponed = case.postpone and micro + 1 < case.micro
            with net.no_sync() if postponed else nullcontext():
                loss = net(*data[step * case.micro + micro])
                seen.append(loss.item())
                if event == "overflow" and rank() == 1 and micro == 0:
                    loss = loss * (torch.inf if case.precision == "fp16" else 1.0)
                net.backward(loss / case.micro)
        norm = net.clip_grad_norm(0.5).nan_to_num(-1, -1).item()
        seen += [norm, net.step(), net.precision.state_dict()]
    if case.plan.parameters.sharded and not case.overlap:
        assert not any(flat.is_unsharded for flat in net.flats)
    return seen, net.state_dict()


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
at = Plan.stage
both = {"precision": "fp16", "micro": 2, "events": True}
CASES: dict[str, Case] = {
    **{f"stage {s}, small buckets": Case(at(s), bucket_size=40) for s in (0, 3)},
    **{f"stage {s}, 3 micro-batches": Case(at(s), micro=3) for s in (1, 2, 3)},
    "stage 1, postponed": Case(at(1), micro=3, postpone=True),
    **{f"stage {s}, bf16": Case(at(s), "bf16", micro=2) for s in (1, 2, 3)},
    **{f"stage {s}, Muon": Case(at(s), optimizer=muon) for s in (1, 2, 3)},
    "stage 3, Muon, bf16": Case(at(3), "bf16", muon, overlap=(ALL, ALL, NONE)),
    # later chapters
    "prefetch": Case(at(3), overlap=(ALL, ALL, NONE)),
    "little prefetch": Case(at(3), overlap=(2000, 3000, NONE)),
    "kept units": Case(at(3), overlap=(2000, 3000, 900), micro=2),
    "late reductions": Case(at(2), overlap=(NONE, ALL, NONE), micro=2),
    "recomputed": Case(at(3), recompute=("full", False)),
    "host, states alone": Case(at(1, "cpu"), "bf16"),
    "host, Muon": Case(at(2, "cpu"), "bf16", muon),
    "files, short slices": Case(at(3, "nvme", "nvme"), "bf16", buffers=(2, 64)),
    "files, long slices": Case(at(3, "nvme", "nvme"), "bf16", buffers=(3, 1 << 20)),
    "delayed, fp32": Case(at(2, "cpu"), storage="Delayed"),
    # everything at once, with steps that fail
    "files": Case(at(3, "nvme", "nvme"), **both, overlap=(2000, 3000, NONE)),
    "files, kept": Case(
        at(3, "nvme", "nvme"), **both, buffers=(1, 192), overlap=(ALL, ALL, ALL),
        recompute=("full", True),
    ),
    "files and host": Case(
        at(3, "nvme", "cpu"), **both, overlap=(2000, ALL, 900),
        recompute=("selective", False),
    ),
    "parameters in files": Case(
        at(3, None, "nvme"), optimizer=momentum, micro=2, events=True,
        overlap=(ALL, ALL, NONE),
    ),
    "states in files, postponed": Case(
        at(1, "nvme"), **both, overlap=(NONE, ALL, NONE), postpone=True
    ),
    "host": Case(
        at(3, "cpu", "cpu"), **both, overlap=(2000, 3000, NONE),
        recompute=("none", True),
    ),
    "host, postponed": Case(
        at(1, "cpu"), **both, overlap=(NONE, ALL, NONE), recompute=("full", False),
        postpone=True,
    ),
    "delayed": Case(
        at(3, "cpu", "cpu"), **both, storage="Delayed", overlap=(ALL, ALL, 900),
        recompute=("full", True),
    ),
    "overlap": Case(
        at(3), **both, overlap=(2000, 3000, NONE), recompute=("full", False)
    ),
    "quantized, overlap": Case(
        at(3), "bf16", bits=(8, 4), micro=2, overlap=(2000, 3000, 900)
    ),
}  # fmt: skip


def offloaded() -> Iterator[tuple[str, Case]]:
    """Every plan that stores something off the device in fp16, and some in fp32."""
    for i, plan in enumerate(plans("device", "cpu") + plans("device", "cpu", "nvme")):
        if i % 3 == 0:
            yield name_of(plan), Case(plan, micro=2)
        yield f"{name_of(plan)}, fp16", Case(plan, "fp16", micro=2, events=True)


PLACES = dict(offloaded())
QUICK = [name for name in PLACES if "fp16" not in name][::2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pool, Case], Any]:
    """The run of a case's reference: one for each arithmetic."""

    @cache
    def run(pool: Pool, case: Case) -> Any:
        return pool.run(train, case, tmp_path_factory.mktemp("reference"))

    return lambda pool, case: run(pool, case.reference())


def check(pool: Pool, case: Case, reference: Any, folder: Path) -> None:
    (expected, weights), *_ = reference(pool, case)
    (seen, got), *_ = pool.run(train, case, folder)
    assert seen == expected
    assert same(weights, got)
    if case.precision == "fp16" and case.events:
        skipped = [state["skipped_steps"] for state in seen if isinstance(state, dict)]
        assert skipped[-1] == 2


# what cases with `events` do too, among all else; chapters show these one by one
REPEATED = {name for name, case in CASES.items() if not case.events}
REPEATED -= {"stage 0, small buckets", "stage 3, small buckets", "stage 1, postponed"}
REPEATED -= {"stage 3, bf16", "stage 3, Muon", "quantized, overlap"}
REPEATED |= {"host, postponed", "parameters in files", "files and host"}


@pytest.mark.parametrize("name", some(CASES, lambda name: name in REPEATED))
def test_equal(two: Pool, tmp_path: Path, reference: Any, name: str) -> None:
    check(two, CASES[name], reference, tmp_path)


@pytest.mark.parametrize("name", some(PLACES, lambda name: name not in QUICK))
def test_equal_in_every_place(
    two: Pool, tmp_path: Path, reference: Any, name: str
) -> None:
    check(two, PLACES[name], reference, tmp_path)
    assert not list((tmp_path / "files").glob("*"))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_equal_on_other_ranks(ranks: int, tmp_path: Path, reference: Any) -> None:
    with Pool(ranks) as pool:
        for stage, precision in product((1, 2, 3), ("fp32", "bf16")):
            case = Case(at(stage), precision, micro=2, bucket_size=100 * stage)
            check(pool, case, reference, tmp_path)


class Own(torch.optim.SGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own = True  # a setting that is in no group

    def step(self, closure: Any = None) -> None:
        assert self.own
        super().step(closure)


OPTIMIZERS = {
    "sgd": partial(Own, lr=0.1, momentum=0.9, nesterov=True),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "for-loop adam": partial(torch.optim.Adam, lr=1e-2, foreach=False, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
}
FEW = ("sgd", "for-loop adam")


@pytest.mark.parametrize("name", some(OPTIMIZERS, lambda name: name not in FEW))
def test_any_elementwise_optimizer(
    two: Pool, tmp_path: Path, reference: Any, name: str
) -> None:
    for plan in (at(3), at(3, "cpu", "nvme")):
        check(two, Case(plan, optimizer=OPTIMIZERS[name]), reference, tmp_path)


# against torch


def full(x: Any) -> Tensor:
    """What FSDP2 has sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def by_torch(how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms, and weights, of plain torch: on the rows of all ranks in each
    process ("one process"), or under DDP or FSDP2."""
    torch.manual_seed(0)
    model = Nasty()  # on the CPU, since gloo moves no memory of a GPU
    wrapped: nn.Module = model
    if how == "ddp":
        options = {"find_unused_parameters": True}
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
    elif how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = nasty.adamw(nasty.groups(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    seen = []
    for step, batch in enumerate(batches(STEPS, 1, rows=2)):
        model.step = step
        every = [t.cpu() for t in batch]
        mine = [own(t, 2) for t in every]
        with torch.no_grad():
            seen.append(wrapped(*mine).item())
        wrapped(*(every if how == "one process" else mine)).backward()
        norm: Any = nn.utils.clip_grad_norm_(trained, 0.5)
        seen.append(full(norm).item())
        nasty.step(optimizer, trained)
    weights: dict[str, Any] = model.state_dict()
    if how == "fsdp2":
        weights = {
            k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in weights.items()
        }
    return seen, weights


def by_backend(case: Case, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """With torch's own collectives, which GPUs use."""
    with minizero.comm.algorithm("backend"):
        return train(case, folder)


@pytest.mark.parametrize("peer", ["one process", "ddp", "fsdp2", "backend"])
def test_as_torch(two: Pool, tmp_path: Path, peer: str) -> None:
    case = Case(at(3))
    seen, weights = two.run(train, case, tmp_path)[0]
    if peer == "backend":
        expected, others = two.run(by_backend, case, tmp_path)[0]
    else:
        expected, others = two.run(by_torch, peer)[0]
    numbers = [[x for x in run if type(x) is float] for run in (seen, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-5)
    for name, weight in others.items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)
