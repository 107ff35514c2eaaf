"""Steps predicted, against rows that others published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from minizero.scale import MACHINES, MODELS, Machine, predict
from minizero.scale.elsewhere import DEEPSPEED, FSDP
from minizero.scale.predict import adam_seconds
from minizero.scale.published import Row, calibrate, mean_error, rows
from minizero.scale.shapes import find, of_parameters
from minizero.zero import Schedule

SHAPE = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50_368}
JOB = SHAPE | {"sequence": 2048, "micro_batch": 8, "world_size": 8, "stage": 3}


@pytest.fixture(scope="module")
def table() -> list[tuple[Row, float]]:
    return [(row, row.error()) for row in rows()]


def test_errors_of_the_published_rows_are_as_small_as_the_chapter_says(
    table: Sequence[tuple[Row, float]],
) -> None:
    assert len(table) == 216
    one = [error for row, error in table if row.gpus == 8]
    many = [error for row, error in table if row.gpus > 8]
    assert mean_error(one) < 0.045 and mean_error(many) < 0.045
    for name in ("h100-80gb", "a100-80gb", "a100-40gb"):
        mine = [(r.gpus > 8, e) for r, e in table if r.machine == name]
        assert mean_error(e for far, e in mine if not far) < 0.08
        assert mean_error(e for far, e in mine if far) < 0.12
    assert sum(abs(error) > 0.1 for _, error in table) <= 20


@pytest.mark.parametrize("name", ["h100-80gb", "a100-80gb", "a100-40gb"])
def test_the_two_constants_of_a_machine_fit_its_rows_of_eight_gpus(
    name: str, table: Sequence[tuple[Row, float]]
) -> None:
    machine = MACHINES[name]
    mine = [
        (row, error)
        for row, error in table
        if (row.machine, row.gpus, row.precision) == (name, 8, "bf16")
    ]
    mine = mine[::3]  # a third of them: the whole takes a minute
    least = mean_error(error for _, error in mine)
    for constant in ("matmul", "attention"):
        for factor in (1.1, 1 / 1.1):
            value = getattr(machine, constant) * factor
            other = replace(machine, **{constant: value})
            assert mean_error(row.error(other) for row, _ in mine) > least


def test_calibration_finds_the_constants_that_made_the_rows() -> None:
    true = MACHINES["a100-80gb"]
    chosen = [r for r in rows() if r.model == "mpt-125m" and r.machine == "a100-80gb"]
    made = [
        replace(r, tokens=r.predict(true).tokens_per_second_per_gpu) for r in chosen
    ]
    found = calibrate(replace(true, matmul=0.6, attention=0.5), made)
    assert found.matmul == pytest.approx(true.matmul, rel=0.02)
    assert found.attention == pytest.approx(true.attention, rel=0.02)


def test_the_share_of_the_peak_is_counted_as_published(
    table: Sequence[tuple[Row, float]],
) -> None:
    """The page's own MFU, of rows whose attention is 16 % and 4 % of the whole."""
    for sequence, tokens, published in ((8192, 1384, 0.2992), (2048, 2002, 0.3811)):
        row = next(r for r, _ in table if (r.sequence, r.tokens) == (sequence, tokens))
        found = row.predict()
        ours = found.mfu * row.tokens / found.tokens_per_second_per_gpu
        assert ours == pytest.approx(published, rel=5e-3)


def test_flop_of_others_are_counted_as_they_count_them() -> None:
    """Of a GPT, 96 B s l h^2 (1 + s / 6h + V / 16lh): Narayanan et al. 2021, eq. 3."""
    gpts = [other for other in DEEPSPEED if other.flops and not other.shape.gated]
    assert len(gpts) == 12
    for other in gpts:
        shape, h = other.shape, other.shape.hidden
        more = 1 + other.sequence / (6 * h) + shape.vocab / (16 * shape.layers * h)
        tokens = other.flops / (96 * shape.layers * h * h * more)
        assert other.published == pytest.approx(tokens, rel=2e-3)


def test_fsdp_elsewhere_is_predicted_blind() -> None:
    errors = {(o.name, o.published): o.error() for o in FSDP}
    assert len(errors) == 16
    assert mean_error(errors.values()) < 0.07
    assert max(map(abs, errors.values())) < 0.12, errors
    measured = [o for o in FSDP if o.memory]
    assert len(measured) == 6
    for other in measured:  # of the allocator; ours is a bound on live bytes
        assert other.predict().memory.total == pytest.approx(other.memory, rel=0.1)


def test_deepspeed_elsewhere_comes_out_in_its_order_and_size() -> None:
    errors = {other.name: other.error() for other in DEEPSPEED}
    assert mean_error(errors.values()) < 0.14
    assert max(map(abs, errors.values())) < 0.23, errors
    rate = {o.name: o.predict().tokens_per_second_per_gpu for o in DEEPSPEED}
    # throughput collapses with the micro-batch: 144, 88, 44 TFLOP/s
    four, two, one = (rate[f"175B, {n} A100"] for n in (384, 768, 1536))
    assert four > 1.4 * two > 1.4 * 1.6 * one
    # published: 1.40 and 1.39
    for size in ("18B", "138B"):
        gain = rate[f"{size}, 384 V100, ZeRO++"] / rate[f"{size}, 384 V100"]
        assert 1.15 < gain < 1.5
    device, adam, both = (
        12 * 1024 / rate[f"52B, 64 V100, batch 12, {where} on the CPU"]
        if where
        else 8 * 1024 / rate["52B, 64 V100, batch 8"]
        for where in ("", "Adam", "all")
    )
    # published: 117, 175, 177 seconds
    assert device < adam < both < 1.05 * adam
    assert 1.2 < adam / device < 1.6


def test_adam_on_the_host_takes_as_long_as_was_measured() -> None:
    """ZeRO-Offload, table 4: 0.22 s for 1e9 parameters, one process on a DGX-2."""
    assert 1e9 * adam_seconds(MACHINES["v100-32gb"], 1, "cpu") == pytest.approx(
        0.22, rel=0.1
    )
    # ZeRO-Infinity, fig. 2b: 12 GB/s for one GPU, 3 for each of sixteen
    machine = MACHINES["v100-32gb"]
    assert machine.slot(1) == pytest.approx(12e9, rel=0.1)
    assert machine.slot(16) == pytest.approx(3e9, rel=0.1)


BIG = JOB | {"world_size": 64, "machine": "v100-32gb", "precision": "fp16"}


def test_groups_keep_a_slow_network_out_of_the_gathers() -> None:
    machine = replace(MACHINES["v100-32gb"], network=0.5e9, gpus=8)
    slow = BIG | {"machine": machine, "micro_batch": 1}
    flat, group, copy = (
        predict(**(slow | how)) for how in ({}, {"group": 8}, {"secondary": 8})
    )
    assert flat.step_seconds > 1.2 * group.step_seconds
    assert flat.step_seconds > 1.2 * copy.step_seconds
    # all in the group is 8 times as much state; of the parameters alone, 2 bytes of 16
    n = MODELS["mpt-1b"].parameters
    assert group.memory.optimizer == 12 * n / 8
    assert copy.memory.optimizer == 12 * n / 64
    assert copy.memory.parameters == group.memory.parameters


def test_codes_send_less_only_where_they_are_sent() -> None:
    def sent(**how: int) -> dict[str, float]:
        line = predict(**(BIG | how)).timeline
        found = dict.fromkeys(("all_gather", "reduce_scatter"), 0.0)
        for interval in line.intervals:
            if interval.lane == "link":
                found[interval.what] += interval.nbytes
        return found

    plain, weights = sent(), sent(weight_bits=8)
    gradients = sent(gradient_bits=4)
    half = (1 + 1 / 128) / 2
    assert weights["all_gather"] == pytest.approx(half * plain["all_gather"])
    assert weights["reduce_scatter"] == plain["reduce_scatter"]
    quarter = (0.5 + 1 / 128) / 2
    assert gradients["reduce_scatter"] == pytest.approx(
        quarter * plain["reduce_scatter"]
    )
    assert gradients["all_gather"] == plain["all_gather"]


def test_selective_repeats_every_other_linear_layer() -> None:
    """Llama 2 13B in torchtitan: 2,162 tokens/s without, 1,904 with."""
    job = dict(vars(MODELS["llama-13b"]), sequence=4096, micro_batch=2, world_size=64)
    plain, every, other = (
        predict(**job, stage=3, checkpointing=how).step_seconds
        for how in ("none", "matmuls", "selective")
    )
    assert plain < every < 1.05 * plain
    assert other / plain == pytest.approx(2162 / 1904, rel=0.02)


def test_stages_cost_what_their_schedule_makes_of_their_bytes() -> None:
    times = [predict(**{**JOB, "stage": stage}) for stage in range(4)]
    calls = [t.timeline.calls for t in times]
    assert calls == [25, 50, 50, 75]  # 25 units: reduce; and publish; gather twice
    assert times[3].exposed_seconds > 0
    alone = predict(**{**JOB, "world_size": 1})
    assert alone.exposed_seconds == 0 < alone.step_seconds
    eager = predict(**JOB, schedule=lambda largest: Schedule())
    assert eager.step_seconds > times[3].step_seconds


def test_accumulation_reduces_at_each_micro_batch_where_gradients_are_sharded() -> None:
    def extra(stage: int) -> float:
        one = predict(**{**JOB, "stage": stage})
        return predict(**{**JOB, "stage": stage}, accumulation=4).exposed_seconds - (
            one.exposed_seconds
        )

    assert extra(1) == 0 < extra(2) < extra(3)
    one, two, three = (
        predict(**JOB, accumulation=n).step_seconds for n in (1, 2, 3)
    )  # and updates once
    assert three - two == pytest.approx(two - one) and three - two < one


def test_memory_agrees_with_the_estimate_and_with_a_published_run() -> None:
    shape = MODELS["llama-8b"]
    assert shape.parameters == 8_030_261_248
    job = dict(vars(shape), sequence=8192, micro_batch=2, world_size=8, stage=3)
    memory = predict(**job, checkpointing="selective", reduce="fp32").memory
    assert memory.optimizer == 12 * shape.parameters / 8
    # torchtitan reports 82.4 GiB
    assert memory.total / 2**30 == pytest.approx(82.4, rel=0.1)
    less = predict(**job, checkpointing="full").memory
    assert less.total < memory.total < predict(**job).memory.total
    off = predict(**job, offload_optimizer="cpu").memory
    assert off.optimizer == 0 < off.host and off.gradients < memory.gradients


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"machine": "b200"}, "machine must be one of h100-80gb, .* not 'b200'"),
        ({"micro_batch": 0}, "micro_batch must be a whole number >= 1, not 0"),
        ({"precision": "int8"}, "precision must be one of bf16, .* not 'int8'"),
        ({"heads": 7}, "heads must divide hidden"),
        ({"checkpointing": "some"}, "checkpointing must be one of none, matmuls"),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"layers": "24"}, "layers must be a whole number >= 1, not '24'"),
        ({"sequence": float("nan")}, "sequence must be a whole number >= 1, not nan"),
        ({"micro_batch": float("inf")}, "micro_batch must be a whole number >= 1"),
        ({"micro_batch": True}, "micro_batch must be a whole number >= 1, not True"),
        ({"group": 3}, "groups of 3 ranks cannot be made of 8"),
        ({"secondary": 2, "group": 2}, "use it at stage 3, without group"),
        ({"secondary": 2, "stage": 2}, "use it at stage 3, without group"),
        ({"weight_bits": 6}, "quantized to 8 or 4 bits, not 6"),
        ({"weight_bits": 8, "stage": 2}, "leave weight_bits out"),
        ({"stage": 1, "offload_param": "gpu"}, "a placement is on one of device"),
    ],
)
def test_predict_refuses_in_a_sentence(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        predict(**(JOB | change))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "fast", True])
def test_a_machine_refuses_what_is_no_rate(value: object) -> None:
    with pytest.raises(ValueError, match="hbm of the machine 'mine' must be a number"):
        replace(MACHINES["a100-80gb"], name="mine", hbm=value)
    assert isinstance(replace(MACHINES["a100-80gb"], drives=0), Machine)


def test_shapes_have_their_published_parameters(tmp_path) -> None:  # type: ignore[no-untyped-def]
    published_sizes = {
        "gpt2-xl": 1.556e9,
        "mpt-7b": 6.65e9,
        "llama-7b": 6.738e9,
        "llama-13b": 13.016e9,
        "llama-70b": 70.554e9,
        "llama-405b": 405.85e9,
        "mistral-7b": 7.242e9,
        "gpt-175b": 174.6e9,
    }
    for name, size in published_sizes.items():
        assert MODELS[name].parameters == pytest.approx(size, rel=2e-3), name
    for size in (1e8, 1.3e9, 7e9, 70e9, 1e12):
        assert of_parameters(size).parameters == pytest.approx(size, rel=0.17)
    path = tmp_path / "config.json"
    path.write_text(
        '{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,'
        '"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,'
        '"hidden_act": "silu", "tie_word_embeddings": false}'
    )
    assert find(str(tmp_path)).parameters == MODELS["llama-8b"].parameters
    path.write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="does not say num_hidden_layers or"):
        find(str(path))
    with pytest.raises(ValueError, match="model must be one of gpt2, .* not 'bert'"):
        find("bert")


def test_activations_in_fp32_take_twice_the_bytes() -> None:
    job = dict(vars(MODELS["gpt2"]), sequence=1024, micro_batch=1, world_size=1)
    for how in ("none", "selective", "full"):
        half, whole = (
            predict(**job, stage=0, precision=kind, checkpointing=how).memory
            for kind in ("bf16", "fp32")
        )
        logits = 1024 * 50_257
        assert whole.activations - 12 * logits == 2 * (half.activations - 10 * logits)
