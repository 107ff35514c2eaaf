"""Scripts written for DeepSpeed: what they import, call, and do in their own way."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from nasty import on_two_ranks
from torch import Tensor, nn

import minizero
import minizero.deepspeed as deepspeed


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def begin(model: nn.Module, stage: int = 0, **more: Any) -> Any:
    """An engine of micro-batches of 4; `more`: keys of the config, and `given`."""
    given = more.pop("given", {})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, config=config | more, **given)[0]


def step(engine: Any, i: int = 0) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def values(model: nn.Module) -> list[Tensor]:
    with minizero.zero.GatheredParameters(model.parameters()):
        return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True)]


def test_names_are_the_things_themselves() -> None:
    from minizero.deepspeed import comm, zero
    from minizero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from minizero.deepspeed.runtime.zero.partition_parameters import Init
    from minizero.deepspeed.utils import RepeatingLoader, logger
    from minizero.deepspeed.utils.logging import logger as same_logger
    from minizero.kernels import FusedAdam as Kernel

    assert deepspeed.runtime.engine.DeepSpeedEngine is minizero.Engine
    assert Init is zero.Init
    assert RepeatingLoader is minizero.utils.RepeatingLoader
    assert logger is same_logger and comm.ReduceOp is torch.distributed.ReduceOp
    p = nn.Parameter(torch.ones(3))
    for made in (FusedAdam([p], 0.1), DeepSpeedCPUAdam([p], lr=0.1)):
        assert isinstance(made, Kernel) and made.defaults["decoupled_weight_decay"]
    with pytest.raises(AttributeError, match="does not support deepspeed.init_infe"):
        deepspeed.init_inference()
    with pytest.raises(ImportError):
        import_module("minizero.deepspeed.moe.layer")


def test_local_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    assert parser.parse_args([]).local_rank == 3
    assert parser.parse_args(["--local_rank=1"]).local_rank == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_accelerator_of_a_cpu() -> None:
    a = deepspeed.get_accelerator()
    assert a.device_name(1) == a.current_device_name() == "cpu"
    assert a.is_available() and a.is_bf16_supported() and not a.empty_cache()
    assert a.memory_allocated() == 0 == a.max_memory_allocated(0)
    assert a.communication_backend_name() == "gloo"
    with pytest.raises(AttributeError, match="torch.cpu has no warp_drive"):
        a.warp_drive()


@on_two_ranks
def test_ranks_talk() -> None:
    import minizero.deepspeed.comm as dist
    from minizero.deepspeed.utils import groups, log_dist

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    one = torch.ones(2)
    dist.all_reduce(one, op=dist.ReduceOp.SUM, group=dist.get_world_group())
    assert dist.is_initialized() and one.tolist() == [2.0, 2.0]
    assert dist.get_local_rank() == dist.get_rank() == groups.get_data_parallel_rank()
    assert groups.get_data_parallel_world_size() == dist.get_world_size() == 2
    log_dist("seen", ranks=[0])


@on_two_ranks
def test_a_model_is_built_in_shards() -> None:
    """`zero.Init` and `GatheredParameters` with all their arguments."""
    wanted = [*net().state_dict().values()]
    with deepspeed.zero.Init(remote_device="cpu", dtype=torch.half, pin_memory=True):
        within = net()
    model = net()
    deepspeed.zero.Init(
        module=model, config_dict_or_path={"zero_optimization": {"stage": 3}}
    )
    assert all(p.isnan().all() for p in model.parameters())
    for made in (within, model):
        gathered = [*made.parameters(), None]
        with deepspeed.zero.GatheredParameters(gathered, fwd_module=made):
            assert all(same([*made.parameters()], wanted))
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
        assert model[0].weight.isnan().all()
    assert {p.ds_status.name for p in model.parameters()} == {"NOT_AVAILABLE"}
    step(begin(model, 3))
    assert not any(same(values(model), wanted))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_optimizer_leaves_out_is_frozen(stage: int) -> None:
    model = net()
    before = values(model)
    given = {"optimizer": torch.optim.AdamW(model[2].parameters(), 1e-2)}
    with pytest.warns(UserWarning, match="no group with them: 0.weight, 0.bias"):
        step(begin(model, stage, optimizer=None, given=given))
    assert same(before, values(model)) == [True, True, False, False]


def test_checkpoints_become_fp32_files(tmp_path: Path) -> None:
    """A frozen parameter is in them, too."""
    model = net()
    model[0].requires_grad_(False)
    begin(model).save_checkpoint(tmp_path, "all")
    tool, out, safe = deepspeed.utils.zero_to_fp32, tmp_path / "out", tmp_path / "safe"
    tool.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, tag="all")
    tool.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, safe, "5GB", safe_serialization=True, tag="all"
    )
    assert (safe / "model.safetensors").exists()
    loaded = torch.load(out / "pytorch_model.bin")
    fresh = tool.load_state_dict_from_zero_checkpoint(net(1), tmp_path, "all")
    for state in (loaded, fresh.state_dict()):
        assert all(same([*state.values()], [*net().state_dict().values()]))
