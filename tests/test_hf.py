"""Hugging Face's Trainer and accelerate's loop, on the engine; without a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from nasty import on_two_ranks
from torch import Tensor

from minizero import zero
from minizero.ranks import Pool, device, rank

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from minizero import hf  # noqa: E402

pytestmark = pytest.mark.thorough

STAGES = (0, 3)
OFF = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2(**more: Any) -> Any:
    """Tied weights."""
    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 64, "n_positions": 24, "n_embd": 32}
    sizes |= {"n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **drop, **OFF, **more)
    return transformers.GPT2LMHeadModel(config)


def llama(**more: Any) -> Any:
    """Grouped-query attention: two heads of queries share one of keys."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, **heads, num_hidden_layers=2, **OFF, **more
    )
    return transformers.LlamaForCausalLM(config)


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences in which a token says the next one, mostly."""

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        first = torch.randint(3, 64, (count, 1), generator=random)
        self.rows = (first + 5 * torch.arange(8)) % 61 + 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


USUAL: dict[str, Any] = {
    "output_dir": "unused",
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def trainer(stage: int, model: Any = None, config: Any = None, **more: Any) -> Any:
    """One of `minizero.hf`; `more`: training arguments, and `callbacks`."""
    # small units are absent too while they are not used
    absent = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {"zero_optimization": {"stage": stage} | absent} | (config or {})
    given = {k: more.pop(k) for k in ("callbacks", "optimizers") if k in more}
    made = hf.Trainer(
        model=gpt2() if model is None else model,
        args=hf.TrainingArguments(deepspeed=config, **USUAL | more),
        train_dataset=Words(),
        eval_dataset=Words(6, seed=1),
        **given,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def trained(stage: int, *args: Any, **more: Any) -> list[float]:
    made = trainer(stage, *args, **more)
    made.train()
    return losses(made)


def weights(of: Any) -> dict[str, Tensor]:
    """Whole, on rank 0."""
    found = of.accelerator.get_state_dict(of.model)
    return {k: v.detach().clone().cpu() for k, v in found.items()}


# plans, dtypes, homes


@on_two_ranks
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_dtypes_are_the_ones_asked_for(name: str) -> None:
    """On a CPU the plain Trainer takes fp16=True and trains in fp32."""
    found = []
    for stage in STAGES:
        made = trainer(stage, **{name: True})
        made.train()
        made.evaluate()
        engine, args = made.model_wrapped, made.args
        found.append(losses(made))
        dtypes = {p.dtype for p in engine.module.parameters()}
        assert dtypes == {torch.float16 if name == "fp16" else torch.bfloat16}
        # nobody else casts, moves, or takes more than the one device of a rank
        assert args.mixed_precision == made.accelerator.mixed_precision == "no"
        assert not args.place_model_on_device and args.n_gpu <= 1
        assert args.world_size == 2 and args.use_cpu != torch.cuda.is_available()
        assert args.device == engine.device, 'not "cpu:0"'
        assert engine.optimizer.loss_scale == (65536 if name == "fp16" else 1)
    assert found[0] == found[1]


# the config


def prepare(accelerator: Any, times: int = 1) -> None:
    for _ in range(times):
        model = gpt2()
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))


ONE = {"train_micro_batch_size_per_gpu": 1}
FOUR = ONE | {"gradient_accumulation_steps": 4}
DATA = {"train_dataset": Words()}
REFUSED: dict[str, Callable[[], Any]] = {
    "gradient_clipping=7.0 vs hf": (
        lambda: trainer(2, config={"gradient_clipping": 7.0}).train()
    ),
    "bf16_full_eval": lambda: trainer(2, bf16_full_eval=True),
    "Adafactor": lambda: trainer(2, optim="adafactor").train(),
    "TrainingArguments of minizero.hf": lambda: hf.Trainer(
        gpt2(), transformers.TrainingArguments(use_cpu=True, **USUAL), **DATA
    ),
    "use minizero.hf.Trainer, or mix minizero.hf.TrainerMixin": (
        lambda: transformers.Trainer(
            gpt2(), hf.TrainingArguments(deepspeed={}, **USUAL), **DATA
        )
    ),
    "no engine yet": lambda: hf.Accelerator(ONE).backward(torch.ones(())),
    "1 models and 0 optimizers": lambda: hf.Accelerator(ONE).prepare(gpt2()),
    '"bf16" in the config': lambda: hf.Accelerator(ONE, mixed_precision="bf16"),
    "gradient_accumulation_steps=2, and the config 4": (
        lambda: prepare(hf.Accelerator(FOUR, gradient_accumulation_steps=2))
    ),
    "another model needs another accelerator": (
        lambda: prepare(hf.Accelerator(ONE), times=2)
    ),
}


@on_two_ranks
def test_what_contradicts_or_does_not_go_is_refused() -> None:
    for words, attempt in REFUSED.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            attempt()


# evaluate, train, look


@on_two_ranks
def test_gradient_checkpointing_label_smoothing_and_compilation() -> None:
    runs = []
    for stage in STAGES:
        usual = trained(stage)
        smooth = trained(stage, label_smoothing_factor=0.1)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = trained(stage, torch_compile=True, torch_compile_backend="eager")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert trained(stage, gradient_checkpointing=True) == usual
        torch.testing.assert_close(usual, compiled)
        assert smooth[0] != usual[0] and smooth[-1] < smooth[0]
        runs.append((usual, compiled, smooth))
    assert runs[0] == runs[1]


# save, resume, hand over


def test_a_run_goes_on_under_another_stage(two: Pool, tmp_path: Path) -> None:
    saves = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}

    def run(stage: int, folder: Path, resume: Any) -> Any:
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        config = {"zero_optimization": zero}
        made = trainer(stage, None, config, output_dir=str(folder), fp16=True, **saves)
        made.train(resume_from_checkpoint=resume)
        return losses(made)

    unbroken = two.run(run, 3, tmp_path / "whole", None)[0]
    resume = str(tmp_path / "whole" / "checkpoint-3")
    assert two.run(run, 2, tmp_path / "other", resume)[0] == unbroken


@on_two_ranks
@pytest.mark.parametrize("only", [False, True])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, only: bool) -> None:
    made = trainer(
        3,
        output_dir=str(tmp_path),
        learning_rate=0.1,  # so that it gets worse
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_only_model=only,
        load_best_model_at_end=True,
    )
    made.train()
    every = [h["eval_loss"] for h in made.state.log_history if "eval_loss" in h]
    assert len(every) == 4
    assert made.evaluate()["eval_loss"] == min(every) < every[-1]


def test_saved_models_are_those_of_transformers(two: Pool, tmp_path: Path) -> None:
    """In bf16, by `save_model`, and by the recipe of accelerate in parts."""

    def run() -> Tensor:
        made = trainer(3, llama(), bf16=True)
        made.train()
        made.save_model(str(tmp_path / "whole"))
        state = made.accelerator.get_state_dict(made.model_wrapped)
        inner = made.accelerator.unwrap_model(made.model_wrapped)
        assert inner is made.model
        main = made.accelerator.is_main_process
        more = {"state_dict": state, "is_main_process": main, "max_shard_size": "20KB"}
        inner.save_pretrained(tmp_path / "parts", **more)
        with pytest.raises(RuntimeError, match="sharded"):
            inner.save_pretrained(tmp_path / "wrong")
        inner.eval()
        with torch.no_grad():
            return made.model_wrapped(Words(2).rows).logits

    logits = two.run(run)[0]
    assert len([*(tmp_path / "parts").glob("*.safetensors")]) > 1
    for folder in ("whole", "parts"):
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(tmp_path / folder).eval().to(device())
        with torch.no_grad():
            assert torch.equal(model(Words(2).rows.to(device())).logits, logits)


# the model


def test_generation_keeps_ranks_in_step(two: Pool) -> None:
    """A rank whose answer ends early gathers on until the others are done."""

    def run() -> Any:
        made = trainer(3)
        alone = gpt2().to(device())
        made.evaluate()
        prompt = Words(4).rows[rank() : rank() + 1, :3].to(device())
        with torch.no_grad():
            length = 3 + 6 * rank()
            more = {"max_new_tokens": length, "min_new_tokens": length}
            more["do_sample"] = False
            return [m.generate(prompt, **more).tolist() for m in (made.model, alone)]

    found = two.run(run)
    assert all(ours == theirs for ours, theirs in found)
    assert len(found[0][0][0]) < len(found[1][0][0])


@on_two_ranks
def test_any_trainer_takes_the_mixins() -> None:
    class Seq2SeqTrainer(hf.TrainerMixin, transformers.Seq2SeqTrainer): ...

    class Seq2SeqArguments(
        hf.ArgumentsMixin, transformers.Seq2SeqTrainingArguments
    ): ...

    def run(stage: int) -> Any:
        torch.manual_seed(0)
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        more = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        t5 = transformers.T5Config(vocab_size=64, **sizes, **more)
        config = {"zero_optimization": {"stage": stage}}
        more = {"predict_with_generate": True, "generation_max_length": 6}
        args = Seq2SeqArguments(deepspeed=config, **USUAL | more)
        model = transformers.T5ForConditionalGeneration(t5)
        data = {"train_dataset": Words(), "eval_dataset": Words(6)}
        made = Seq2SeqTrainer(model=model, args=args, **data)
        made.train()
        return losses(made), made.predict(Words(3)).predictions.tolist()

    assert run(0) == run(3)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    return tmp_path


@on_two_ranks
def test_a_pretrained_model_is_loaded_into_shards(pretrained: Path) -> None:
    with zero.Init():
        model = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert all(zero.is_sharded(p) for p in model.parameters())
    ours = trained(3, model)
    with zero.Init():  # a head that is not in the files, made anew
        auto = transformers.AutoModelForSequenceClassification
        head = auto.from_pretrained(pretrained, num_labels=3)
    assert all(zero.is_sharded(p) for p in head.parameters())
    with zero.GatheredParameters(head.parameters()):
        assert head.score.weight.std() > 0
    assert ours == trained(3, llama())


def lora(**more: Any) -> Any:
    names = ["q_proj", "v_proj"]
    return peft.LoraConfig(target_modules=names, task_type="CAUSAL_LM", **more)


def test_lora_on_a_frozen_base(two: Pool, tmp_path: Path) -> None:
    def run(stage: int) -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(llama(), lora(r=4))
        folder = tmp_path / str(stage)
        more = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2}
        made = trainer(stage, model, **more)
        made.train()
        wraps = patch.object(model, "save_pretrained", wraps=model.save_pretrained)
        with wraps as saves:
            made.save_model(str(folder / "adapter"))
        for call in saves.call_args_list:  # on rank 0; the base is not asked for
            assert all("lora_" in name for name in call.kwargs["state_dict"])
        again = trainer(stage, peft.get_peft_model(llama(), lora(r=4)), **more)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert losses(again) == losses(made)
        return losses(made), weights(made)

    (runs, whole), (sharded, _) = two.run(run, 0)[0], two.run(run, 3)[0]
    assert runs == sharded
    assert any(v.any() for k, v in whole.items() if "lora_B" in k)
    base = llama().state_dict()
    frozen = {k.removeprefix("base_model.model."): v for k, v in whole.items()}
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        assert torch.equal(frozen[name], base[name])
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "3" / "adapter")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, whole[name]), name


# accelerate's own loop


@on_two_ranks
def test_the_loop_of_accelerate(tmp_path: Path) -> None:
    def loop(stage: int, resume: bool) -> Any:
        keys = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
        config = {"zero_optimization": {"stage": stage}} | dict.fromkeys(keys, "auto")
        accelerator = hf.Accelerator(config, gradient_accumulation_steps=2)
        model, loader = gpt2(), torch.utils.data.DataLoader(Words(32), 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, loader, decay = accelerator.prepare(
            model, optimizer, loader, decay
        )
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        found = []
        for step, batch in enumerate(loader):
            if resume and step < 4:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                decay.step()
                optimizer.zero_grad()
            found.append(loss.item())
            if step == 3 and stage == 0:
                accelerator.save_state(str(tmp_path / "state"))
        assert (model.global_steps, model.micro_steps) == (4, 8)
        assert len(found) == (4 if resume else 8)
        assert model.get_batch_info() == (8, 2, 2) and model.gradient_clipping() == 0
        return found, optimizer.param_groups[0]["lr"]

    whole, one, two = (loop(stage, False) for stage in (0, 1, 2))
    resumed, rate = loop(3, True)
    assert whole == one and one[1] == two[1] == rate < 1e-2
    assert resumed == pytest.approx(whole[0][4:]) and whole[0][-1] < whole[0][0]
