"""`Trainer` and `TrainingArguments`, on the engine, and their config.

For another class of trainers, as `transformers.Seq2SeqTrainer` or a library's own: `class
T(TrainerMixin, TheirTrainer)` and `class A(ArgumentsMixin, TheirArguments)`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.trainer import SCHEDULER_NAME

from .. import checkpoint
from ..config import Source, load, read
from ..engine.start import make_optimizer, make_scheduler
from ..ranks import init_distributed, world_size
from ..zero import GatheredParameters
from .accelerator import Accelerator, plain_cpu

if TYPE_CHECKING:  # a mixin's `super()` is one of these
    from transformers import Trainer as AnyTrainer
    from transformers import TrainingArguments as AnyArguments
else:
    AnyArguments = AnyTrainer = object


class ZeroConfig(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """The config given to `deepspeed=`: a dict, a file's path, or JSON text.

    `config`: a copy, filled in as far as is known. `mismatches`: a line for each value
    that contradicts the arguments.
    """

    def __init__(self, source: Source) -> None:
        # not the one of transformers, which asks for a package deepspeed
        HfDeepSpeedConfig.__init__(self, dict(load(source)[0]))
        self._dtype = None  # of the inherited class: not known yet
        self.mismatches: list[str] = []

    def trainer_config_process(self, args: Any, *more: Any) -> None:
        """Fill in what the arguments say, and the sections they ask for."""
        for name in ("fp16", "bf16"):
            if getattr(args, name):
                self.config.setdefault(name, {"enabled": True})
        for key, argument in (
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ):
            self.config.setdefault(key, "auto")
            self.fill_only(key, getattr(args, argument))
        super().trainer_config_process(args, *more)

    def finished(
        self, args: Any, model: Any, steps: int | None = None
    ) -> dict[str, Any]:
        """The complete config for this number of updates.

        A copy, because an evaluation (`steps` is None) drops the scheduler, and a later
        training needs it. ValueError lists contradictions.
        """
        done = copy.deepcopy(self)
        if steps is None:
            done.config.pop("scheduler", None)
        done.trainer_config_finalize(args, model, steps or 0)
        return done.config


class ArgumentsMixin(AnyArguments):
    """What `minizero.hf` changes in a class of training arguments.

    `zero`: the config that `deepspeed=` gives, with "auto" filled in.
    """

    zero: ZeroConfig
    used_by_minizero = False  # set by `TrainerMixin`

    def __post_init__(self) -> None:
        # transformers would import a package of that name
        source, self.deepspeed = self.deepspeed, None
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        init_distributed(self.ddp_backend, self.ddp_timeout)
        with plain_cpu():
            super().__post_init__()
        self.deepspeed = source
        self.mixed_precision = "no"  # the engine casts
        self._n_gpu = min(self._n_gpu, 1)  # a rank has one device
        self.zero = ZeroConfig({} if source is None else source)
        self.zero.trainer_config_process(self)

    @property
    def place_model_on_device(self) -> bool:
        """The engine does that."""
        return False

    @property
    def deepspeed_plugin(self) -> None:
        """Every Trainer reads this when it is made; a plain one is refused here."""
        if not self.used_by_minizero:
            raise TypeError(
                "these TrainingArguments are minizero.hf's, and this Trainer is not: it "
                "would ignore deepspeed=; use minizero.hf.Trainer, or mix "
                "minizero.hf.TrainerMixin into your class of trainers"
            )

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, value: Any) -> None: ...


class TrainerMixin(AnyTrainer):
    """What `minizero.hf` changes in a class of trainers; transformers calls it."""

    args: Any
    _weights: Any = None  # the gathered model, while `save_model` runs

    def create_accelerator_and_postprocess(self) -> None:
        """Make transformers' accelerator one of ours."""
        if not isinstance(self.args, ArgumentsMixin):
            raise TypeError(
                f"args= is a {type(self.args).__module__}.{type(self.args).__name__}; "
                "give it the TrainingArguments of minizero.hf"
            )
        refused = ("auto_find_batch_size", "fsdp", "parallelism_config")
        for name in (*refused, "fp16_full_eval", "bf16_full_eval"):
            if getattr(self.args, name, None):
                raise ValueError(f"{name} does not work with minizero; leave it out")
        self.args.used_by_minizero = True
        super().create_accelerator_and_postprocess()
        # it is made already; what our `__init__` adds, the arguments have done
        self.accelerator.__class__ = Accelerator
        self.accelerator.config = self._config

    def _config(self, model: nn.Module) -> dict[str, Any]:
        """The engine's config, without what the Trainer does itself."""
        config: dict[str, Any] = self.args.zero.finished(self.args, model)
        config.pop("optimizer", None)
        config.setdefault("zero_optimization", {})["compute_grad_norm"] = False
        return config | {"gradient_clipping": 0.0}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The config's, if it has one; then the Trainer's own only gives the groups."""
        given = self.optimizer is not None
        made = super().create_optimizer(*args, **kwargs)
        config = self.args.zero.finished(self.args, self.model)
        if given or "optimizer" not in config:
            return made
        keys = ("params", "weight_decay")
        groups = [{key: g[key] for key in keys} for g in made.param_groups]
        config = read(config, world_size())
        self.optimizer = make_optimizer(config, None, self.model, groups)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The config's, if it has one."""
        if self.lr_scheduler is None:
            args = self.args, self.model, num_training_steps
            settings = read(self.args.zero.finished(*args), world_size())
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = make_scheduler(settings, None, optimizer)
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Make the engine if there is none yet: an evaluation before training."""
        if self.model_wrapped is self.model:
            self.create_optimizer()
            made = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped, self.optimizer = made
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Through the engine, which casts the model's inputs."""
        return super().prediction_step(self.model_wrapped, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'; every rank calls it, to gather the weights."""
        if self.model_wrapped is not self.model:
            adapters = hasattr(self.model, "peft_config")
            self._weights = self.model_wrapped.module_state_dict(adapters)
        try:
            super().save_model(*args, **kwargs)
        finally:
            self._weights = None

    def _save(self, folder: str | None = None, state_dict: Any = None) -> None:
        """The full model, as `from_pretrained` loads it, or its adapters."""
        super()._save(folder, self._weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, folder: str) -> None:
        """The run: the engine's checkpoint, and the schedule beside it."""
        self.model_wrapped.save_checkpoint(folder)
        if self.args.should_save:
            state = self.lr_scheduler.state_dict()
            torch.save(state, Path(folder, SCHEDULER_NAME))

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        """The model, unless a run's checkpoint has it."""
        if not checkpoint.exists(folder):
            with GatheredParameters(self.model.parameters(), modifier_rank=0):
                super()._load_from_checkpoint(folder, model)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is not None and checkpoint.exists(folder):
            self.model_wrapped.load_checkpoint(folder)
            state = torch.load(Path(folder, SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        if checkpoint.exists(folder):
            self.model_wrapped.load_checkpoint(folder, load_module_only=True)
            return
        with GatheredParameters(self.model.parameters(), modifier_rank=0):
            super()._load_best_model()


class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """transformers' own, with a `deepspeed=` that minizero reads."""


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' own, on the engine."""
