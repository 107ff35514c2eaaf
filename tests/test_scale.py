"""Steps predicted, against rows that others published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minizero.scale import MACHINES, MODELS, Candidate, Job, Prediction, predict
from minizero.scale.cost import adam_seconds
from minizero.scale.published import rows
from minizero.scale.shapes import find

A100, V100 = MACHINES["a100-80gb"], MACHINES["v100-32gb"]
HOW = Candidate.__dataclass_fields__


def step(shape: str = "mpt-1b", stage: int = 3, **options: Any) -> Prediction:
    """A step of 8 GPUs with 8 sequences of 2,048 tokens each, unless said otherwise."""
    options = {"machine": A100, "gpus": 8, "sequence": 2048, "micro_batch": 8} | options
    how = {name: options.pop(name) for name in list(options) if name in HOW}
    job = Job(MODELS[shape], sequences=8 * options["gpus"], **options)
    return predict(job, Candidate(stage, **how))


def test_the_share_of_the_peak_is_counted_as_published() -> None:
    """The page's own MFU, of rows whose attention is 16 % and 4 % of the whole."""
    for sequence, tokens, published in ((8192, 1384, 0.2992), (2048, 2002, 0.3811)):
        row = next(r for r in rows() if (r.sequence, r.tokens) == (sequence, tokens))
        found = row.predict()
        ours = found.mfu * row.tokens / found.tokens_per_second_per_gpu
        assert ours == pytest.approx(published, rel=5e-3)


def test_adam_on_the_host_takes_as_long_as_was_measured() -> None:
    """ZeRO-Offload, table 4: 0.22 s for 1e9 parameters, one process on a DGX-2."""
    assert 1e9 * adam_seconds(V100, 1, "cpu") == pytest.approx(0.22, rel=0.12)
    # ZeRO-Infinity, fig. 2b: 12 GB/s for one GPU, 3 for each of sixteen
    assert V100.slot(1) == pytest.approx(12e9, rel=0.1)
    assert V100.slot(16) == pytest.approx(3e9, rel=0.1)


BIG: dict[str, Any] = {"machine": V100, "gpus": 64, "precision": "fp16"}


def test_groups_keep_a_slow_network_out_of_the_gathers() -> None:
    slow = BIG | {"machine": replace(V100, network=0.5e9, gpus=8), "micro_batch": 1}
    flat, group, copy = (
        step(**slow, **how) for how in ({}, {"group": 8}, {"secondary": 8})
    )
    assert flat.step_seconds > 1.2 * group.step_seconds
    assert flat.step_seconds > 1.2 * copy.step_seconds
    # all in the group is 8 times as much state; of the parameters alone, 2 bytes of 16
    n = MODELS["mpt-1b"].parameters
    assert group.memory.optimizer == 12 * n / 8
    assert copy.memory.optimizer == 12 * n / 64
    assert copy.memory.parameters == group.memory.parameters


def test_quantized_collectives_send_less() -> None:
    def sent(**how: int) -> tuple[float, float]:
        found = dict.fromkeys(("all_gather", "reduce_scatter"), 0.0)
        for interval in step(**BIG, **how).timeline.intervals:
            if interval.lane == "link":
                found[interval.what] += interval.nbytes
        return found["all_gather"], found["reduce_scatter"]

    gathers, reduces = sent()
    half, quarter = (1 + 1 / 128) / 2, (0.5 + 1 / 128) / 2
    assert sent(weight_bits=8) == (pytest.approx(half * gathers), reduces)
    # without groups no node adds its GPUs' gradients before they leave it
    node = pytest.approx(V100.gpus * quarter * reduces)
    assert sent(gradient_bits=4) == (gathers, node)


def test_checkpointing_repeats_what_its_name_says() -> None:
    job: dict[str, Any] = {"sequence": 4096, "micro_batch": 2, "gpus": 64}
    plain, selective, full = (
        step("llama-13b", **job, checkpointing=how).step_seconds
        for how in ("none", "selective", "full")
    )
    assert plain < selective < 1.05 * plain
    assert 1.2 < full / plain < 4 / 3  # a forward, of three, but for its last product


def test_stages_cost_what_their_schedule_makes_of_their_bytes() -> None:
    times = [step(stage=stage) for stage in range(4)]
    calls = [sum(i.lane == "link" for i in t.timeline.intervals) for t in times]
    assert calls == [25, 50, 50, 75]  # 25 units: reduce; and publish; gather twice
    assert times[3].exposed_seconds > 0
    alone = step(gpus=1)
    assert alone.exposed_seconds == 0 < alone.step_seconds


def test_accumulation_reduces_at_each_micro_batch_where_gradients_are_sharded() -> None:
    def extra(stage: int) -> float:
        four, one = (step(stage=stage, accumulation=n) for n in (4, 1))
        return four.exposed_seconds - one.exposed_seconds

    assert extra(1) == 0 < extra(2) < extra(3)
    one, two, three = (step(accumulation=n).step_seconds for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one) and three - two < one  # one update


def test_memory_agrees_with_the_estimate() -> None:
    shape = MODELS["llama-8b"]
    assert shape.parameters == 8_030_261_248
    job: dict[str, Any] = {"sequence": 8192, "micro_batch": 2}
    memory = step("llama-8b", **job).memory
    assert memory.optimizer == 12 * shape.parameters / 8
    totals = [
        step("llama-8b", **job, checkpointing=how).memory.total
        for how in ("full", "selective", "none")
    ]
    assert totals == sorted(totals)
    off = step("llama-8b", **job, offload_optimizer="cpu").memory
    assert off.optimizer == 0 < off.host and off.gradients < memory.gradients


def test_parameters_from_the_host_take_time_on_one_gpu() -> None:
    on: dict[str, Any] = {"gpus": 1, "offload_optimizer": "cpu", "micro_batch": 1}
    there, here = (step("gpt2-xl", **on, offload_param=at) for at in ("cpu", None))
    assert there.step_seconds > here.step_seconds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"micro_batch": 0}, "micro_batch must be a whole number >= 1, not 0"),
        ({"precision": "int8"}, "precision must be one of bf16, .* not 'int8'"),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"sequence": float("nan")}, "sequence must be a whole number >= 1, not nan"),
        ({"group": 3}, "8 ranks cannot form groups of 3"),
        ({"secondary": 2, "group": 2}, "use it at stage 3, without group"),
        ({"weight_bits": 8, "stage": 2}, "leave weight_bits or gradient_bits out"),
    ],
)
def test_predict_refuses_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        step(**change)


def test_shapes_have_their_published_parameters(tmp_path: Path) -> None:
    billions = {"gpt2-xl": 1.556, "mpt-7b": 6.65, "llama-13b": 13.016}
    billions |= {"llama-405b": 405.85, "gpt-175b": 174.6}
    for name, size in billions.items():
        assert MODELS[name].parameters == pytest.approx(1e9 * size, rel=2e-3), name
    with pytest.raises(ValueError, match="heads must divide hidden"):
        replace(MODELS["mpt-1b"], heads=7)
    path = tmp_path / "config.json"
    keys = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
    keys += "num_key_value_heads", "intermediate_size", "hidden_act", "model_type"
    keys += ("tie_word_embeddings",)
    llama = 4096, 32, 32, 128_256, 8, 14_336, "silu", "llama", False
    gemma = 2048, 18, 8, 256_000, 1, 16_384, "gelu", "gemma", None  # 2B; tied
    for values, size in (llama, MODELS["llama-8b"].parameters), (gemma, 2_506_172_416):
        config = dict(zip(keys, values, strict=True))
        path.write_text(json.dumps(config))
        assert find(str(tmp_path)).parameters == size
    path.write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(ValueError, match="has experts"):
        find(str(path))
    path.write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="does not say num_hidden_layers or"):
        find(str(path))
    with pytest.raises(ValueError, match="model must be one of gpt2, .* not 'bert'"):
        find("bert")
