"""Configs, good and bad, and the sentence about each."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import minizero
from minizero import Plan
from minizero.config import Config, ConfigError, check_options, read
from minizero.config.ignored import IGNORED
from minizero.config.read import KEYS, RESULTS
from minizero.engine.from_config import storage
from minizero.engine.lr_schedules import WarmupDecayLR
from minizero.kernels import muon_options, optimizer_call

ROOT = Path(__file__).parent.parent
DEEPSPEED = json.loads((ROOT / "tests/deepspeed_keys.json").read_text())["keys"]
WITHOUT = ("checkpoint", "flops_profiler")  # whole sections without effect
PAGE = (ROOT / "book/config-reference.md").read_text()


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": stage, **keys}}


def top(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **keys}


def adam(**params: Any) -> dict[str, Any]:
    return top(optimizer={"type": "AdamW", "params": params})


def value(config: Config, where: str) -> Any:
    found: Any = config
    for name in where.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


# What users of DeepSpeed have: fp16, ZeRO-3, both offloads.
EXAMPLE: dict[str, Any] = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 500000000,
        "stage3_param_persistence_threshold": 1000000,
    },
}
NVME = {"device": "nvme", "nvme_path": "disk"}
# On 4 ranks: a config, and what some keys are then, by dotted name.
GOOD: list[tuple[Any, dict[str, Any]]] = [
    (
        EXAMPLE,
        {
            "train_micro_batch_size_per_gpu": 4,
            "plan": Plan.stage(3, "cpu", "cpu"),
            "dtypes": ("float16", "float16", None),
            "files": None,
        },
    ),
    # DeepSpeed's defaults
    (
        top(),
        {
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 1,
            "optimizer": None,
            "zero_optimization.overlap_comm": False,
            "plan": Plan(),
            "dtypes": ("float32", "float32", None),
        },
    ),
    # null is a key left out; whole numbers may be written as floats, or in quotes
    (top(fp16=None, gradient_clipping=None), {"gradient_clipping": 1.0}),
    (top(gradient_clipping="0.5"), {"gradient_clipping": 0.5}),
    (top(bf16={"enabled": "True"}), {"bf16.enabled": True}),
    ('{"train_batch_size": 8, "steps_per_print": Infinity}', {"steps_per_print": 0}),
    # offload
    (zero(1, offload_optimizer={"device": "cpu"}), {"plan": Plan.stage(1, "cpu")}),
    (
        zero(3, offload_param=NVME | {"nvme_path": Path("disk")})
        | {"aio": {"queue_depth": 32}},
        {
            "plan": Plan.stage(3, None, "nvme"),
            "files": {
                "folder": "disk",
                "buffer_count": 5,
                "buffer_size": 100_000_000,
                "block_size": 1_048_576,
                "queue_depth": 32,
            },
        },
    ),
    # groups and quantized messages
    (
        zero(3, zero_hpz_partition_size=2, zero_quantized_weights=True),
        {"groups": (None, 2), "bits": (8, None), "plan.parameters.group": 2},
    ),
    (zero(2, mics_shard_size=2), {"groups": (2, None), "plan.optimizer.group": 2}),
    (zero(1, zero_quantized_gradients=True), {"bits": (None, 4)}),
    # dtypes
    (
        top(
            fp16={"enabled": True},
            communication_data_type="fp32",
            data_types={"buffer_dtype": "bf16"},
        ),
        {"dtypes": ("float16", "float32", "bfloat16")},
    ),
    # optimizers and schedules, in any case of letters
    (adam(betas=[0.8, 0.99]), {"optimizer.params": {"betas": [0.8, 0.99]}}),
    (
        top(optimizer={"type": "sgd"}, scheduler={"type": "warmuplr"}),
        {"optimizer.type": "SGD", "scheduler.type": "WarmupLR", "scheduler.params": {}},
    ),
    # what has no effect, where it asks for nothing
    (
        top(amp={"enabled": False}, wandb={"enabled": False}, compression_training={}),
        {},
    ),
    (zero(2, offload_param={"device": "none"}, round_robin_gradients=True), {}),
]


@pytest.mark.parametrize("source, values", GOOD)
def test_good(source: Any, values: dict[str, Any]) -> None:
    before = copy.deepcopy(source)
    config = read(source, 4)
    assert {where: value(config, where) for where in values} == values
    assert config.warnings == ()
    assert config.world_size == 4
    assert source == before, "what was given has changed"


# On 4 ranks: a config that trains, and words of its warning.
WARNED: list[tuple[Any, str]] = [
    (
        zero(2, offload_param={"device": "cpu"}),
        "zero_optimization.offload_param has no effect at stage 2: parameters are "
        "sharded at stage 3 only",
    ),
    (
        zero(0, offload_optimizer={"device": "cpu", "delayed_update": True}),
        "zero_optimization.offload_optimizer has no effect at stage 0: optimizer "
        "states are sharded from stage 1 on",
    ),
    (
        zero(2, sub_group_size=1e8),
        "zero_optimization.sub_group_size = 100000000.0 has no effect: a collective "
        "moves whole units or buckets; choose their size",
    ),
    (top(wandb={"enabled": True}), "wandb has no effect: write the loss"),
    (top(csv_monitor={"enabled": True}), "csv_monitor has no effect: write the loss"),
    (
        top(fp16={"enabled": "auto"}),
        'fp16.enabled is "auto", but nothing fills it here; the default is used',
    ),
    (adam(lr="auto"), 'optimizer.params.lr is "auto", but nothing fills it here'),
    (top(seed=1), 'the config has no key "seed"; it is not read'),
]


@pytest.mark.parametrize("source, words", WARNED)
def test_a_warning_says_what_has_no_effect(source: Any, words: str) -> None:
    (said,) = read(source, 4).warnings
    assert words in said


TYPES = '"Adam", "AdamW", "SGD", "Adagrad", "Muon", "FusedAdam" or "CPUAdam"'
# On 4 ranks: a config, and words of the error's sentence.
BAD: list[tuple[Any, str]] = [
    # sizes of a batch
    ({}, "give train_batch_size or train_micro_batch_size_per_gpu"),
    (
        {
            "train_batch_size": 250,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 16,
        },
        "train_batch_size = 250, but train_micro_batch_size_per_gpu * "
        "gradient_accumulation_steps * ranks = 4 * 16 * 4: use 256, or leave one out",
    ),
    # types and bounds
    (top(gradient_clipping=-1), "must be greater than or equal to 0, not -1"),
    (zero(offload_param={"buffer_size": 1000}), "must be a multiple of 64, not 1000"),
    (
        zero(offload_param={"device": "gpu"}),
        'zero_optimization.offload_param.device must be "none", "cpu" or "nvme", '
        'not "gpu"',
    ),
    (top(optimizer={"type": "Lamb"}), f'optimizer.type must be {TYPES}, not "Lamb"'),
    (
        top(scheduler={"type": "StepLR"}),
        "construct any other and pass it to initialize",
    ),
    (top(optimizer={"params": {"lr": 1e-3}}), "optimizer.type is missing"),
    # a section that is none
    (
        zero(offload_param="cpu"),
        'zero_optimization.offload_param must be an object in braces, not "cpu"; '
        'write {"device": "cpu"}',
    ),
    (top(bf16=True), 'write {"enabled": true}'),
    (top(aio={"block_size": 5000}), "aio.block_size must be a multiple of 4096"),
    # unknown keys, at the top too
    (
        top(gradient_cliping=1.0),
        'the config has no key "gradient_cliping"; did you mean "gradient_clipping"?',
    ),
    (top(stage=3), 'the config has no key "stage"; it belongs in zero_optimization'),
    (zero(fp16={"enabled": True}), 'has no key "fp16"; it belongs in the top'),
    (zero(prefetch_bucket_size=1), 'did you mean "stage3_prefetch_bucket_size"?'),
    (top(optimizer={"type": "Adam", "lr": 1e-3}), "its keys are type, params"),
    # keys that DeepSpeed has and minizero does not
    (top(amp={"enabled": True}), "minizero does not support amp: do it in the script"),
    (zero(cpu_offload=True), 'write "offload_optimizer" or "offload_param": {"device'),
    # keys that contradict each other
    (top(fp16={"enabled": True}, bf16={"enabled": True}), "are both enabled; disable"),
    (zero(offload_param={"device": "nvme"}), "there is no nvme_path beside it; give"),
    (
        zero(offload_param=NVME, offload_optimizer=NVME | {"nvme_path": "other"}),
        "two nvme_path, other and disk, but all files are in one folder",
    ),
    (
        zero(3, offload_optimizer={"delayed_update": True}),
        'give "device": "cpu" and no',
    ),
    (
        zero(3, zero_hpz_partition_size=8),
        "zero_hpz_partition_size = 8, but 4 ranks cannot shard in groups of 8",
    ),
    (zero(mics_shard_size=2, zero_hpz_partition_size=2), "both make groups; leave one"),
    (zero(mics_shard_size=2, offload_optimizer=NVME), "groups take no nvme"),
    (
        zero(zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
        "zero_hpz_partition_size takes no offload_param; use mics_shard_size",
    ),
    (
        top(communication_data_type="fp32", data_types={"grad_accum_dtype": "bf16"}),
        "differ, but gradients are sent in the dtype in which they are summed",
    ),
    # several at once
    (
        zero(stge=3, overlap_comm="maybe"),
        "2 problems in the config:\n"
        '- zero_optimization has no key "stge"; did you mean "stage"?\n'
        "- zero_optimization.overlap_comm must be a valid boolean",
    ),
    # not a config at all
    (None, "a config is a dict, a path or JSON text, not None"),
    ("[1, 2]", "a config is an object in braces, not [1, 2]"),
    ('{\n "train_batch_size" 8\n}', "Expecting ':' delimiter: line 2 column 21"),
    ('{"gradient_clipping": NaN}', "gradient_clipping must be a finite number"),
]


@pytest.mark.parametrize("source, words", BAD)
def test_bad(source: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(source, 4)
    assert words in str(error.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("\ufeff" + json.dumps(EXAMPLE))
    assert read(path, 4) == read(str(path), 4) == read(EXAMPLE, 4)

    def told(source: Path) -> str:
        with pytest.raises(ConfigError) as error:
            read(source, 4)
        return str(error.value).replace(str(tmp_path), "DIR")

    assert told(tmp_path / "ds_confg.json") == (
        'there is no config file DIR/ds_confg.json; did you mean "ds_config.json"?'
    )
    assert told(tmp_path / "no" / "a.json").endswith("; the folder is DIR/no")
    assert "cannot be read as JSON: [Errno 21] Is a directory" in told(tmp_path)
    path.write_text('{"train_batch_size": 7}')
    assert told(path).startswith("DIR/ds_config.json: train_batch_size = 7, but")
    path.write_text('{"a": 1 "b": 2}')
    assert told(path) == (
        "DIR/ds_config.json: the config cannot be read as JSON: Expecting ',' "
        "delimiter: line 1 column 9 (char 8)"
    )
    path.write_bytes(b"\xff\xfe{}")
    assert "'utf-8' codec can't decode byte 0xff" in told(path)


def test_what_a_config_has_beside_its_keys_is_no_key() -> None:
    told = [f'the config has no key "{name}"; it is not read' for name in RESULTS]
    assert read(top() | dict.fromkeys(RESULTS, 8), 4).warnings == tuple(told)


@pytest.mark.parametrize(
    "kind, params, cls, options",
    [
        ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0, "fused": True}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"fused": True}),
        ("AdamW", {"torch_adam": True, "lr": 0.1}, torch.optim.AdamW, {"lr": 0.1}),
        ("SGD", {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
        ("FusedAdam", {"adam_w_mode": False}, minizero.kernels.FusedAdam, {}),
    ],
)
def test_the_optimizer_is_deepspeeds(
    kind: str, params: dict[str, Any], cls: type, options: dict[str, Any]
) -> None:
    """`Adam` is AdamW there, and decays nothing unless it is told to."""
    found, arguments = optimizer_call(kind, params)
    assert found is cls
    assert options.items() <= arguments.items()
    check_options(found, arguments, "optimizer.params")
    found([torch.zeros(2)], **arguments)


def test_muons_options_are_divided() -> None:
    muon, adamw = muon_options({"lr": 0.1, "adam_lr": 0.2, "momentum": 0.9})
    assert muon == {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1}
    assert adamw["lr"] == 0.2 and adamw["betas"] == (0.9, 0.95)
    muon, adamw = muon_options({})
    assert (muon["lr"], adamw["lr"]) == (0.02, 3e-4)


def test_the_update_is_delayed_by_its_key() -> None:
    offload = {"device": "cpu", "delayed_update": True}
    made = storage(read(zero(2, offload_optimizer=offload), 4))
    assert isinstance(made, minizero.Delayed) and made.plan.optimizer.on == "cpu"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"learning_rate": 1}, "unexpected keyword argument 'learning_rate'; its keys"),
        ({"weight_decy": 1}, "'weight_decy'; did you mean \"weight_decay\"?"),
        ({"lr": "fast"}, 'optimizer.params.lr must be a number, not "fast"'),
    ],
)
def test_options_are_those_of_the_class(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(torch.optim.AdamW, options, "optimizer.params")
    assert str(error.value).startswith("optimizer.params") and words in str(error.value)
    check_options(torch.optim.AdamW, {"lr": 1, "betas": [0, 1]}, "optimizer.params")
    check_options(torch.optim.Muon, {"adjust_lr_fn": "original"}, "optimizer.params")
    with pytest.raises(ConfigError, match="missing a required argument: 'total_num"):
        check_options(WarmupDecayLR, {"warmup_num_steps": 2}, "scheduler.params")


# DeepSpeed's keys, read from its source


def test_writing_out_deepspeeds_defaults_changes_nothing() -> None:
    config: dict[str, Any] = {}
    for place, defaults in DEEPSPEED.items():
        if "params" in place or place in WITHOUT:
            continue
        section = config
        for name in filter(None, place.split(".")):
            section[name] = section.get(name) or {}
            section = section[name]
        section.update(defaults)
    config["train_batch_size"] = 8
    assert read(config, 4) == read(top(), 4)


# the page


def test_the_page_has_every_key_and_its_default() -> None:
    """Its tables have rows `| key | default | what it does |` below a heading."""
    empty, told = read(top(), 4), {}
    for heading, body in re.findall(
        r"^### `?(.+?)`?\n(.*?)(?=^#|\Z)", PAGE, re.S | re.M
    ):
        section = "" if heading == "The top" else f"{heading}."
        for key, default in re.findall(r"^\| `(\w+)` \| (.*?) \|", body, re.M):
            told[section + key] = default
    keys = {where for where, section in KEYS.items() if section is None}
    assert keys - told.keys() == set(), "the page lacks these keys"
    for where in keys:
        if told[where].startswith("`"):  # else it is told in words
            default = json.loads(told[where].strip("`").replace(",", ""))
            assert default == value(empty, where), where
    for where in IGNORED:
        assert f"`{where.rpartition('.')[2]}`" in PAGE, where


@pytest.mark.parametrize("text", re.findall(r"```json\n(.*?)```", PAGE, re.S))
def test_the_pages_configs_train(text: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    config = json.loads(text)
    assert read(config, 8).warnings == ()
    engine = minizero.initialize(model=model, config=config)[0]
    engine.backward(
        engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).sum()
    )
    engine.step()
    engine.destroy()
