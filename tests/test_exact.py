"""The plans give the same losses, norms and weights, bit for bit."""

from __future__ import annotations

from functools import partial

import nasty
import pytest
import torch
from nasty import Nasty, Run, batches, own, same, train
from torch import Tensor, nn

from minizero import parallelize
from minizero.memory.plan import Plan
from minizero.ranks.launch import Pool, rank, world_size


def test_plans_and_bucket_sizes_are_equal(pool: Pool) -> None:
    reference = pool.run(train, 0)
    assert reference[0].norms.max() > 0.5  # clipping took part
    for stage, bucket_size in ((0, 40), (1, 1000), (2, 40), (3, 10**9), (3, 40)):
        got = pool.run(train, stage, bucket_size=bucket_size)
        assert same(got, reference), f"stage {stage}, bucket_size {bucket_size}"


def test_accumulation(pool: Pool) -> None:
    """Reduced at every micro-batch, all four plans agree; postponed, 0 and 1 do."""
    run = partial(pool.run, train, micro_batches=3, steps=8)
    every = run(0)
    for stage in (1, 2, 3):
        assert same(run(stage, bucket_size=100 * stage), every), f"stage {stage}"
    boundary = run(0, postpone=True)
    assert same(run(1, postpone=True), boundary)
    # the two add up the same numbers in another order
    torch.testing.assert_close(boundary[0].losses, every[0].losses)
    if len(every) > 2:
        assert not same(boundary, every)


def on_whole_batch(micro_batches: int) -> Run:
    """Plain torch in one process, on the rows of all ranks; no sharding at all."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    data = batches(nasty.STEPS, micro_batches, rows=2)
    for step in range(nasty.STEPS):
        model.step = step
        for x, y in data[step * micro_batches : (step + 1) * micro_batches]:
            (model(x, y) / micro_batches).backward()
            with torch.no_grad():
                losses.append(model(own(x, 2), own(y, 2)))
        norms.append(nn.utils.clip_grad_norm_(trained, 0.5))
        nasty.step(optimizer, trained)
    return Run(torch.stack(losses), torch.stack(norms), dict(model.state_dict()))


def close(a: Run, b: Run) -> None:
    torch.testing.assert_close(a.losses, b.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.norms, b.norms, rtol=1e-3, atol=1e-5)
    for name, weight in a.weights.items():
        torch.testing.assert_close(weight, b.weights[name], rtol=1e-3, atol=1e-4)


def test_as_one_process_on_the_whole_batch(pool: Pool) -> None:
    expected, got = pool.run(on_whole_batch, 2), pool.run(train, 3, micro_batches=2)
    close(got[0], expected[0])


def by_torch(how: str) -> Run:
    """The same training under torch's own DDP or FSDP2."""
    torch.manual_seed(0)
    model = Nasty()
    if how == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=True
        )
        optimizer = nasty.adamw(nasty.groups(model))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        optimizer = nasty.adamw(nasty.groups(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    for step, (x, y) in enumerate(batches(nasty.STEPS, 1, rows=2)):
        model.step = step
        loss = wrapped(own(x, 2), own(y, 2))
        loss.backward()
        losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        nasty.step(optimizer, trained)
    weights = {
        k: v.full_tensor() if hasattr(v, "full_tensor") else v
        for k, v in model.state_dict().items()
    }
    return Run(torch.stack(losses), torch.stack(norms), weights)


@pytest.mark.parametrize("peer", ["ddp", "fsdp2"])
def test_as_torch(two: Pool, peer: str) -> None:
    close(two.run(train, 3)[0], two.run(by_torch, peer)[0])


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "for-loop adam": partial(torch.optim.Adam, lr=1e-2, foreach=False, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(two: Pool, name: str) -> None:
    make = OPTIMIZERS[name]
    reference = two.run(train, 0, make_optimizer=make)
    for stage in (1, 3):
        assert same(two.run(train, stage, make_optimizer=make), reference)


def stepped(stage: int) -> dict[str, Tensor]:
    """An optimizer that has made steps before it is handed over."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    net = parallelize(model, optimizer, Plan.stage(stage))
    for x, y in batches(2, 1, rows=2):
        net.backward(net(own(x, 2), own(y, 2)))
        net.step()
    return net.state_dict()


def test_state_from_before_is_kept(two: Pool) -> None:
    reference = two.run(stepped, 0)[0]
    for stage in (1, 3):
        got = two.run(stepped, stage)[0]
        assert all(torch.equal(reference[name], got[name]) for name in got)
    fresh = two.run(train, 0)[0].weights
    assert any(not torch.equal(reference[name], fresh[name]) for name in fresh)


def refused(name: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(ValueError) as error:
        parallelize(model, optimizer)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Adafactor", "use an element-wise optimizer such as AdamW or SGD"),
        ("LBFGS", "use an element-wise optimizer such as AdamW or SGD"),
        ("Muon", "use minizero.zero.Muon, which leaves matrices whole"),
    ],
)
def test_an_optimizer_that_needs_shapes_is_refused(name: str, advice: str) -> None:
    said = refused(name)
    assert said.startswith(name)
    assert said.endswith(advice)


@pytest.mark.parametrize("algorithm", ["ring", "backend"])
def test_other_algorithms_are_close(two: Pool, algorithm: str) -> None:
    close(two.run(train, 3, algorithm=algorithm)[0], two.run(train, 3)[0])


def scheduled(stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    net = parallelize(model, optimizer, Plan.stage(stage))
    losses = []
    for x, y in batches(6, 1, rows=2):
        loss = net(own(x, 2), own(y, 2))
        net.backward(loss)
        net.step()
        schedule.step()
        losses.append(loss.detach())
    assert schedule.get_last_lr()[0] == pytest.approx(1e-5)
    return losses


def test_schedulers(two: Pool) -> None:
    reference = two.run(scheduled, 0)
    assert two.run(scheduled, 3) == reference
    assert two.run(rank) == [0, 1]


def uneven(stage: int) -> tuple[Tensor, dict[str, Tensor]]:
    """One step in which rank 1 uses a parameter that rank 0 does not."""
    torch.manual_seed(0)
    model = Nasty()
    before = model.blocks[2].unused.detach().clone()
    optimizer = torch.optim.SGD(nasty.groups(model), lr=1.0)
    net = parallelize(model, optimizer, Plan.stage(stage))
    x, y = batches(1, 1, rows=2)[0]
    loss = net(own(x, 2), own(y, 2))
    if rank() == 1:
        loss = loss + model.blocks[2].unused.sum()
    net.backward(loss)
    net.step()
    return before, net.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_use_different_parameters_do_not_diverge(
    two: Pool, stage: int
) -> None:
    before, weights = two.run(uneven, stage)[0]
    # the group of vectors has lr 3e-3; the gradient's mean over the ranks is 1/2,
    # and the weight decay of that group is 0
    expected = before - 3e-3 * 0.5
    torch.testing.assert_close(weights["blocks.2.unused"], expected)
