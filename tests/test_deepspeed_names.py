"""Scripts written for DeepSpeed: what they import, call, and do in their own way."""

from __future__ import annotations

import argparse
import csv
import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minizero
import minizero.deepspeed as deepspeed
from minizero.ranks import Pool

RANKS = (2,)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(i: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of this rank."""
    g = torch.Generator().manual_seed(10 * i + minizero.comm.get_rank())
    return torch.randn(4, 6, generator=g), torch.randint(0, 3, (4,), generator=g)


def config(stage: int = 0, micro_batches: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def begin(model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    return deepspeed.initialize(model=model, config=settings, **more)[0]


def whole(engine: Any) -> list[Tensor]:
    with minizero.zero.GatheredParameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# names


def test_local_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    parser = argparse.ArgumentParser()
    assert not hasattr(
        deepspeed.add_config_arguments(parser).parse_args([]), "local_rank"
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    assert parser.parse_args([]).local_rank == 3
    assert parser.parse_args(["--local_rank=1"]).local_rank == 1


def test_names_are_the_things_themselves() -> None:
    from minizero.deepspeed import comm, zero
    from minizero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from minizero.deepspeed.runtime.zero.partition_parameters import Init
    from minizero.deepspeed.utils import RepeatingLoader, logger
    from minizero.deepspeed.utils.logging import logger as same_logger
    from minizero.kernels import FusedAdam as Kernel

    assert deepspeed.DeepSpeedEngine is minizero.Engine
    assert deepspeed.runtime.engine.DeepSpeedEngine is minizero.Engine
    assert Init is zero.Init and issubclass(Init, minizero.zero.Init)
    assert RepeatingLoader is minizero.utils.RepeatingLoader
    assert logger is same_logger and isinstance(logger, logging.Logger)
    assert comm.ReduceOp is torch.distributed.ReduceOp
    assert deepspeed.checkpointing is minizero.checkpointing
    p = nn.Parameter(torch.ones(3))
    for made in (FusedAdam([p], 0.1), DeepSpeedCPUAdam([p], lr=0.1)):
        assert isinstance(made, Kernel) and made.defaults["decoupled_weight_decay"]
    with pytest.raises(AttributeError, match="does not support deepspeed.init_infe"):
        deepspeed.init_inference()
    with pytest.raises(ImportError):
        import_module("minizero.deepspeed.moe.layer")


def test_the_accelerator_of_a_cpu() -> None:
    a = deepspeed.get_accelerator()
    if a.device_name() != "cpu":
        pytest.skip("there is a GPU")
    assert a.device_name(1) == a.current_device_name() == "cpu"
    assert a.is_available() and a.is_bf16_supported()
    assert a.memory_allocated() == 0 == a.max_memory_allocated(0)
    assert a.communication_backend_name() == "gloo"
    assert not a.empty_cache() and a.synchronize() is None
    with pytest.raises(AttributeError, match="torch.cpu has no warp_drive"):
        a.warp_drive()


def test_on_device() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(3, 3)
    with deepspeed.OnDevice(torch.float16, enabled=False):
        plain = nn.Linear(3, 3)
    assert layer.weight.is_meta and layer.weight.dtype is torch.bfloat16
    assert not plain.weight.is_meta and plain.weight.dtype is torch.float32


def talk() -> None:
    import minizero.deepspeed.comm as dist
    from minizero.deepspeed.utils import groups, log_dist

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    one = torch.ones(2)
    dist.all_reduce(one, op=dist.ReduceOp.SUM, group=dist.get_world_group())
    assert dist.is_initialized() and one.tolist() == [2.0, 2.0]
    assert dist.get_local_rank() == dist.get_rank() == groups.get_data_parallel_rank()
    assert groups.get_data_parallel_world_size() == dist.get_world_size() == 2
    assert groups.get_model_parallel_world_size() == 1
    log_dist("seen", ranks=[0])


def build_sharded() -> None:
    """`zero.Init` and `GatheredParameters` with all their arguments."""
    wanted = [p.detach().clone() for p in net().parameters()]
    with deepspeed.OnDevice(torch.float64, "cpu"):  # random numbers are drawn in it
        double = [*net().parameters()]
    with deepspeed.zero.Init(remote_device="cpu", dtype=torch.float64, pin_memory=True):
        within = net()
    model = net()
    deepspeed.zero.Init(module=model, config_dict_or_path=config(3))
    for made, values in ((within, double), (model, wanted)):
        assert all(p.isnan().all() for p in made.parameters() if made is model)
        gathered = [*made.parameters(), None]
        with deepspeed.zero.GatheredParameters(gathered, fwd_module=made):
            for p, q in zip(made.parameters(), values, strict=True):
                assert p.dtype is q.dtype and torch.equal(p, q)
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
        assert model[0].weight.isnan().all()
    assert all(
        p.ds_status.name == "NOT_AVAILABLE" and p.ds_id for p in model.parameters()
    )
    engine = begin(model, config(3))
    engine.backward(engine(batch(0)[0]).sum())
    engine.step()
    assert not same(whole(engine), wanted)


def test_on_ranks(pool: Pool) -> None:
    pool.run(talk)
    pool.run(build_sharded)


# a script's own ways


def test_what_the_optimizer_leaves_out_is_frozen() -> None:
    for stage in (0, 3):
        model = net()
        before = [p.detach().clone() for p in model.parameters()]
        made = torch.optim.AdamW(model[2].parameters(), 1e-2)
        with pytest.warns(UserWarning, match="no group with them: 0.weight, 0.bias"):
            engine = begin(model, config(stage, optimizer=None), optimizer=made)
        x, y = batch(0)
        engine.backward(nn.functional.cross_entropy(engine(x), y))
        engine.step()
        pairs = zip(before, whole(engine), strict=True)
        assert [torch.equal(a, b) for a, b in pairs] == [True, True, False, False]


# keys that do the plain thing


def rows(path: Path) -> list[list[str]]:
    with path.open() as file:
        return [*csv.reader(file)]


def test_frozen_parameters_are_saved_too(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    engine = begin(model, config())
    engine.save_checkpoint(tmp_path, "all")
    assert "0.weight" in minizero.consolidate(tmp_path, "all")
    out = tmp_path / "fp32"
    to_fp32 = deepspeed.utils.zero_to_fp32
    to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, tag="all")
    loaded = torch.load(out / "pytorch_model.bin")
    safe = tmp_path / "safe"
    to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, safe, "5GB", safe_serialization=True, tag="all"
    )
    assert (safe / "model.safetensors").exists()
    fresh = to_fp32.load_state_dict_from_zero_checkpoint(net(1), tmp_path, "all")
    assert same([*loaded.values()], [*net().state_dict().values()])
    assert same([*fresh.state_dict().values()], [*loaded.values()])


def test_values_are_written(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = begin(net(), config(0, 2, csv_monitor=monitor))
    losses = []
    for i in range(4):
        x, y = batch(i)
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.monitor.write_events([("Eval/a b", 3.0, 7)])
    name, *found = rows(tmp_path / "job" / "Train_Samples_train_loss.csv")
    assert name == ["step", "train_loss"] and [row[0] for row in found] == ["8", "16"]
    means = [sum(losses[:2]) / 2, sum(losses[2:]) / 2]
    assert [float(row[1]) for row in found] == pytest.approx(means, rel=1e-6)
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv")[1:] == [
        ["8", "0.01"],
        ["16", "0.01"],
    ]
    assert rows(tmp_path / "job" / "Eval_a_b.csv") == [["step", "a b"], ["7", "3.0"]]


def test_tensorboard_is_written_if_it_is_there(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path)}
    if find_spec("tensorboard"):
        assert begin(net(), config(tensorboard=monitor)).monitor.enabled
    else:
        with pytest.warns(UserWarning, match="no values for TensorBoard"):
            assert not begin(net(), config(tensorboard=monitor)).monitor.enabled
