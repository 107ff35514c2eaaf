"""Scripts written for DeepSpeed: what they import, call, and do in their own way."""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import re
import warnings
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minizero
import minizero.deepspeed as deepspeed
from minizero.config.unsupported import INNER, SECTIONS, TOP, ZERO
from minizero.deepspeed import names
from minizero.engine.delegate import REFUSED
from minizero.ranks.launch import Pool

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


def test_every_name_of_the_table_is_there() -> None:
    for module, targets in names.NAMES.items():
        found = import_module(f"minizero.deepspeed.{module}".rstrip("."))
        for name in " ".join(targets.values()).split():
            theirs = name.partition("=")[0]
            assert theirs == "*" or getattr(found, theirs) is not None, (module, name)


def test_lines_of_examples_that_are_not_done_are_refused(root: Path) -> None:
    """Each name, key and method that the README lists."""
    table = (root / "README.md").read_text().partition("| line | in |\n")[2]
    table = table.partition("\n\n")[0]
    lines = [row.split("|")[1] for row in table.splitlines()[1:]]
    found = re.findall(r'`(deepspeed\.|engine\.|")([\w.]+)"?`', "".join(lines))
    assert len(found) > len(lines)
    refused = TOP | SECTIONS | ZERO | INNER
    for kind, name in found:
        if kind == '"':
            assert name in refused
        elif kind == "engine.":
            assert name in REFUSED
        else:
            with pytest.raises(
                (AttributeError, ImportError), match=f"deepspeed.{name}: "
            ):
                attrgetter(name)(deepspeed)


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


def test_options_by_their_first_names() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert not parser.parse_args([]).deepscale
    args = parser.parse_args(["--deepscale", "--deepscale_config=a.json"])
    assert args.deepscale and args.deepspeed_config == "a.json"


def test_names_are_the_things_themselves() -> None:
    from minizero.deepspeed import comm, zero
    from minizero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from minizero.deepspeed.runtime.zero.partition_parameters import Init
    from minizero.deepspeed.utils import RepeatingLoader, logger
    from minizero.deepspeed.utils.logging import logger as same_logger
    from minizero.engine.engine import Engine
    from minizero.kernels import FusedAdam as Kernel

    assert deepspeed.DeepSpeedEngine is Engine
    assert deepspeed.runtime.engine.DeepSpeedEngine is Engine
    assert Init is zero.Init and issubclass(Init, minizero.zero.Init)
    assert RepeatingLoader is minizero.utils.RepeatingLoader
    assert logger is same_logger and isinstance(logger, logging.Logger)
    assert comm.ReduceOp is torch.distributed.ReduceOp
    assert deepspeed.checkpointing is minizero.checkpointing
    p = nn.Parameter(torch.ones(3))
    for made in (FusedAdam([p], 0.1), DeepSpeedCPUAdam([p], lr=0.1)):
        assert isinstance(made, Kernel) and made.defaults["adam_w_mode"]
    assert not hasattr(deepspeed, "init_inference")


@pytest.mark.parametrize(
    "line, why",
    [
        ("from minizero.deepspeed.moe.layer import MoE", "parallelism but of data"),
        ("import minizero.deepspeed.inference.v2", "does not serve"),
        ("from minizero.deepspeed import init_inference", "does not serve"),
        ("from minizero.deepspeed.utils import foo", "utils.foo: it has the names"),
        ("from minizero.deepspeed.ops.op_builder import CPUAdamBuilder", "no kernels"),
        ("from minizero.deepspeed.zero import MiCS_Init", "use zero.Init"),
        (
            "from minizero.deepspeed.pipe import PipelineModule; PipelineModule()",
            "rank",
        ),
    ],
)
def test_other_names_say_why_they_are_not_there(line: str, why: str) -> None:
    with pytest.raises(ImportError, match=f"minizero does not do deepspeed.*{why}"):
        exec(line)


def test_experts_are_refused_where_they_are_spread() -> None:
    from minizero.deepspeed.moe.utils import (
        split_params_into_different_moe_groups_for_optimizer as split,
    )

    model = net()
    groups = split({"params": model.parameters(), "name": "all"})
    assert [len(group["params"]) for group in groups] == [4]
    model[0].weight.allreduce = False
    with pytest.raises(ValueError, match="allreduce=False"):
        split({"params": model.parameters()})


def test_parts_of_a_model_by_name() -> None:
    from minizero.deepspeed.compression.helper import (
        recursive_getattr,
        recursive_setattr,
    )

    model, layer = nn.Sequential(net()), nn.Linear(1, 1)
    recursive_setattr(model, "0.0", layer)
    recursive_setattr(model, "other", layer)
    assert recursive_getattr(model, "0.0.weight") is model.other.weight is layer.weight


def test_the_accelerator_of_a_cpu() -> None:
    a = deepspeed.get_accelerator()
    if a.device_name() != "cpu":
        pytest.skip("there is a GPU")
    assert a.device_name(1) == a.current_device_name() == "cpu"
    assert (
        a.is_available() and a.is_bf16_supported() and a.on_accelerator(torch.ones(1))
    )
    assert torch.bfloat16 in a.supported_dtypes()
    assert a.memory_allocated() == 0 == a.max_memory_allocated(0)
    assert a.communication_backend_name() == "gloo"
    for nothing in (a.empty_cache, a.synchronize, a.reset_peak_memory_stats):
        assert nothing() is None
    a.set_device(0)
    a.manual_seed_all(7)
    assert torch.initial_seed() == 7
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

    deepspeed.init_distributed(dist_backend="gloo", verbose=False, rank=-1)
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
    with deepspeed.zero.Init(remote_device="cpu", dtype=torch.float64, pin_memory=True):
        within = net()
    model = net()
    deepspeed.zero.Init(module=model, config_dict_or_path=config(3))
    for made, dtype in ((within, torch.float64), (model, torch.float32)):
        assert all(p.isnan().all() for p in made.parameters() if made is model)
        gathered = [*made.parameters(), None]
        with deepspeed.zero.GatheredParameters(gathered, fwd_module=made):
            for p, q in zip(made.parameters(), wanted, strict=True):
                assert p.dtype is dtype and torch.equal(p, q.to(dtype))
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
        assert model[0].weight.isnan().all()
    with pytest.raises(ValueError, match="zero_quantized_weights"):
        deepspeed.zero.Init(zero_quantized_weights=True)
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [
        model[0],
        model[2],
    ]
    assert deepspeed.utils.z3_leaf_module(model[2])
    leaves = deepspeed.utils.get_z3_leaf_modules
    deepspeed.utils.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])
    assert leaves(model) == []
    by_name = deepspeed.utils.set_z3_leaf_modules_by_name
    assert by_name(model, ["2", "9"], raise_if_not_found=False) == ([model[2]], ["9"])
    by_suffix = deepspeed.utils.set_z3_leaf_modules_by_suffix
    assert by_suffix(nn.ModuleDict({"a": model}), ["a.1"]) == ([model[1]], [])
    with pytest.raises(ValueError, match="no module of the model is b"):
        by_name(model, ["0", "b"])
    deepspeed.utils.unset_z3_leaf_modules(model, [nn.Module])  # and what it is made of
    assert leaves(model) == []
    engine = begin(model, config(3))
    engine.backward(engine(batch(0)[0]).sum())
    engine.step()
    assert not same(whole(engine), wanted)


def asked_about() -> None:
    """What scripts read of an engine."""
    engine = begin(net(), config(2, 2, steps_per_print=float("inf")))
    assert engine.optimizer_name() == "AdamW"
    assert isinstance(engine.optimizer.optimizer, torch.optim.AdamW)
    assert (
        engine.zero_reduce_bucket_size()
        == 500_000_000
        == engine.zero_allgather_bucket_size()
    )
    assert engine.zero_prefetch_bucket_size() == 50_000_000
    assert engine.zero_optimization_stage() == 2 and engine.zero_overlap_comm() is False
    assert engine.gradient_clipping() == 1.0 and engine.steps_per_print() == 0
    assert not engine.dynamic_loss_scale() and not engine.fp16_enabled()
    assert not engine.optimizer.needs_scaler()
    engine.tput_timer.update_epoch_count()
    assert engine.get_batch_info() == (16, 4, 2)
    group = engine.data_parallel_group
    assert torch.distributed.get_world_size(group) == 2
    assert not engine.monitor.enabled and engine.tput_timer.avg_samples_per_sec() == 0.0
    other = {k: v + 1 for k, v in net().state_dict().items()}
    engine.load_module_state_dict(other)
    assert same(whole(engine), [*other.values()])


def test_on_ranks(pool: Pool) -> None:
    pool.run(talk)
    pool.run(build_sharded)
    pool.run(asked_about)


# a script's own ways


def trained(stage: int, micro_batches: int, way: str, **more: Any) -> list[Tensor]:
    model = net()
    engine = begin(model, config(stage, micro_batches, **more))
    for i in range(3 * micro_batches):
        x, y = batch(i)
        loss = nn.functional.cross_entropy(engine(x).float(), y)
        if way == "engine":
            engine.backward(loss)
        elif way == "scale":
            engine.scale(loss).backward()
        else:
            loss.backward()
        engine.step()
    return whole(engine)


def every_backward() -> None:
    """`loss.backward()` and `engine.scale(loss).backward()`: the same bits."""
    for stage, micro_batches in ((0, 1), (1, 2), (2, 2), (3, 1), (3, 2)):
        first = trained(stage, micro_batches, "engine")
        assert same(first, trained(stage, micro_batches, "loss")), (
            stage,
            micro_batches,
        )
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    for stage in (1, 3):
        first = trained(stage, 2, "engine", **fp16)
        assert same(first, trained(stage, 2, "scale", **fp16))


def backward_refused() -> None:
    """Where it would be wrong it is refused, and the run goes on as if nothing was."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    for stage in (0, 3):
        engine = begin(net(), config(stage, 1, **fp16))
        assert engine.optimizer.needs_scaler()
        before = whole(engine)
        with pytest.raises(RuntimeError, match="the loss needs the loss scale, 256"):
            engine(batch(0)[0]).float().sum().backward()
        engine.step()
        assert same(before, whole(engine))
        engine.scale(engine(batch(0)[0]).float().sum()).backward()
        engine.step()
        assert not same(before, whole(engine))
    engine = begin(net(), config(1, 2))
    with pytest.raises(RuntimeError, match="comes from no output of the model"):
        engine.module[2](torch.ones(1, 8)).sum().backward()
    engine = begin(net(), config(1))
    out = engine(batch(0)[0]).sum()
    out.register_hook(lambda g: 1 / 0)
    bad = engine(batch(0)[0])
    bad.grad_fn.register_prehook(lambda g: 1 / 0)  # after the first gradient
    with pytest.raises(ZeroDivisionError):
        bad.sum().backward()
    before = whole(engine)
    engine.step()
    assert same(before, whole(engine))


def adversaries() -> tuple[list[Tensor], list[Tensor]]:
    """A loss of one engine through the model of another, and in plain torch."""

    def step(g: Any, d: Any, backward: Any, z: Tensor, real: Tensor) -> None:
        d_loss = d(real).mean() - d(g(z).detach()).mean()
        backward(d, d_loss)
        backward(g, d(g(z)).mean())

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(3, 4), nn.Linear(4, 1)

    (g, d), (g2, d2) = models(), models()
    settings = config(1, gradient_clipping=0)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    g_engine, d_engine = begin(g, settings), begin(d, settings)
    g_plain = torch.optim.SGD(g2.parameters(), 0.1)
    d_plain = torch.optim.SGD(d2.parameters(), 0.1)
    for i in range(3):
        torch.manual_seed(i)  # the same on every rank: nothing to average
        z, real = torch.randn(5, 3), torch.randn(5, 4)

        def ours(engine: Any, loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        def plain(model: nn.Module, loss: Tensor) -> None:
            loss.backward()
            (g_plain if model is g2 else d_plain).step()

        step(g_engine, d_engine, ours, z, real)
        d_engine.zero_grad(), g_engine.zero_grad()
        step(g2, d2, plain, z, real)
        d_plain.zero_grad(), g_plain.zero_grad()
    return (
        [*whole(g_engine), *whole(d_engine)],
        [p.detach() for m in (g2, d2) for p in m.parameters()],
    )


def through_another() -> bool:
    """Micro-batches of one engine, through a model that another one trains."""
    torch.manual_seed(1)
    g, d = nn.Linear(3, 4), nn.Linear(4, 1)
    plain = nn.Sequential(copy.deepcopy(g), copy.deepcopy(d))
    settings = config(1, 2, gradient_clipping=0)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, other = begin(g, settings), begin(d, settings)
    torch.manual_seed(2)
    for _ in range(2):
        z = torch.randn(5, 3)
        (plain(z).mean() / 2).backward()
        engine.backward(other(engine(z)).mean())
        engine.step()
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.1 * p.grad
    found = whole(engine)
    with pytest.raises(RuntimeError, match="the loss goes through two engines"):
        other(engine(z)).mean().backward()
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(found, plain[0].parameters(), strict=True)
    )


def several_engines() -> None:
    assert through_another()
    ours, plain = adversaries()
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    for stage in (0, 3):
        model = net()
        first = begin(model, config(stage))
        first.backward(first(batch(0)[0]).sum())
        first.step()
        left = whole(first)
        check = pytest.warns(UserWarning, match="this model had an engine")
        if minizero.comm.get_rank():
            second = begin(model, config(stage))
        else:
            with check:
                second = begin(model, config(stage))
        assert same(left, whole(second))
        with pytest.raises(RuntimeError, match="another minizero.initialize has taken"):
            first(batch(0)[0])
        second.backward(second(batch(1)[0]).sum())
        second.step()
        assert not same(left, whole(second))
        assert len(second.module_state_dict()) in (0, 4)


def part_of_the_parameters() -> None:
    for stage in (0, 3):
        model = net()
        made = torch.optim.AdamW(model[2].parameters(), 1e-2)
        before = [p.detach().clone() for p in model.parameters()]
        settings = config(stage)
        del settings["optimizer"]
        if minizero.comm.get_rank():
            engine = begin(model, settings, optimizer=made)
        else:
            with pytest.warns(
                UserWarning, match="2 parameters are in no group.* 0.wei"
            ):
                engine = begin(model, settings, optimizer=made)
        x, y = batch(0)
        engine.backward(nn.functional.cross_entropy(engine(x), y))
        engine.step()
        moved = [
            not torch.equal(a, b) for a, b in zip(before, whole(engine), strict=True)
        ]
        assert moved == [False, False, True, True]


def test_a_scripts_own_ways(pool: Pool) -> None:
    pool.run(every_backward)
    pool.run(backward_refused)
    pool.run(several_engines)
    pool.run(part_of_the_parameters)


def test_a_scheduler_of_another_optimizer() -> None:
    model = net()
    other = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    with pytest.warns(
        UserWarning, match="moves another optimizer, a SGD, so the learn"
    ):
        engine = begin(model, config(), lr_scheduler=scheduler)
    engine.backward(engine(batch(0)[0]).sum())
    engine.step()
    assert engine.get_lr() == [1e-2] and other.param_groups[0]["lr"] == 0.5


# keys that do the plain thing


def rows(path: Path) -> list[list[str]]:
    with path.open() as file:
        return [*csv.reader(file)]


def test_frozen_parameters_are_saved_too(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    engine = begin(model, config())
    with pytest.warns(UserWarning, match="exclude_frozen_parameters has no effect"):
        engine.save_checkpoint(tmp_path, "all", exclude_frozen_parameters=True)
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
    table = tmp_path / "flops.txt"
    profiler = {"enabled": True, "output_file": str(table)}
    settings = config(0, 2, csv_monitor=monitor, flops_profiler=profiler)
    engine = begin(net(), settings)
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
    assert "Sequential" in table.read_text()


def test_tensorboard_is_written_if_it_is_there(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path)}
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.warns(UserWarning, match="nothing is written for TensorBoard"):
            engine = begin(net(), config(tensorboard=monitor))
        assert not engine.monitor.enabled
    else:
        engine = begin(net(), config(tensorboard=monitor))
        assert engine.monitor.enabled


def test_other_optimizers_and_schedules() -> None:
    settings = config(
        1,
        optimizer={"type": "adagrad", "params": {"lr": "0.1", "weight_decay": 0.01}},
        scheduler={
            "type": "LRRangeTest",
            "params": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
        },
    )
    model, plain = net(), net()
    engine = begin(model, settings | {"gradient_clipping": 0})
    made = torch.optim.Adagrad(plain.parameters(), 0.1, weight_decay=0.01)
    rates = []
    for i in range(3):
        rates.append(engine.get_lr()[0])
        made.param_groups[0]["lr"] = rates[-1]
        for m in (engine, plain):
            loss = nn.functional.cross_entropy(m(batch(i)[0]), batch(i)[1])
            engine.backward(loss) if m is engine else loss.backward()
        engine.step()
        made.step()
        made.zero_grad()
    assert rates == pytest.approx([0.1, 0.15, 0.2])
    assert same(whole(engine), [p.detach() for p in plain.parameters()])


def test_few_live_parameters_are_a_warning(pool: Pool) -> None:
    """0 is written to free each unit at once: only what is in use is whole."""
    assert pool.run(few_live) == [True, True]


def few_live() -> bool:
    most = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True}
    plain = trained(3, 1, "engine", zero_optimization=most)
    most["stage3_max_live_parameters"] = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        few = trained(3, 1, "engine", zero_optimization=most)
    expected = 0 if minizero.comm.get_rank() else 1
    found = [
        w for w in said if "stage3_max_live_parameters = 0 is less" in str(w.message)
    ]
    assert len(found) == expected
    return same(plain, few)


@pytest.mark.parametrize("folder", [None, ""])
def test_a_save_needs_a_folder(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="save_dir is a folder"):
        begin(net(), config()).save_checkpoint(folder)
    assert not [*tmp_path.iterdir()]
