"""`Trainer` and `TrainingArguments`, on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import SCHEDULER_NAME

from .. import comm
from ..config import read
from ..engine import Engine
from ..engine.start import make_optimizer, make_scheduler
from ..ranks import init_distributed
from ..ranks.launch import device, world_size
from ..zero import GatheredParameters
from .accelerator import Accelerator
from .bases import AnyArguments, AnyTrainer
from .config import ZeroConfig
from .environment import check_arguments, check_evaluation, plain_cpu, saved_run


class ArgumentsMixin(AnyArguments):
    """What `minizero.hf` changes in a class of training arguments.

    `deepspeed`: a config; without one, every rank keeps everything.
    `zero`: that config, its "auto" values filled in.
    """

    zero: ZeroConfig
    if TYPE_CHECKING:  # fields of a dataclass are not declared twice
        deepspeed: Any
        use_cpu: bool
        _n_gpu: int

    def __post_init__(self) -> None:
        # transformers would import a package of that name
        source, self.deepspeed = self.deepspeed, None
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        # it asks for ranks at once, and would not find ours
        init_distributed(self.ddp_backend, self.ddp_timeout)
        with plain_cpu():
            super().__post_init__()
        self.deepspeed = source
        self.mixed_precision = "no"  # inside: dtypes are the engine's
        self._n_gpu = min(self._n_gpu, 1)  # a rank has one device
        self.zero = ZeroConfig({} if source is None else source)
        self.zero.trainer_config_process(self)
        check_evaluation(self, self.zero)

    @property
    def place_model_on_device(self) -> bool:
        """The engine does that."""
        return False


class Making(AnyTrainer):
    """The accelerator, the optimizer and the schedule of a trainer."""

    args: Any
    accelerator: Accelerator
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator that transformers makes be ours."""
        check_arguments(self.args, ArgumentsMixin)
        super().create_accelerator_and_postprocess()
        # made without our `__init__`; the arguments have done what that does
        self.accelerator.__class__ = Accelerator
        self.accelerator.config = self._config
        asked = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        if asked.get("sync_each_batch"):  # older releases do not hand it on
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def _config(self, model: nn.Module) -> dict[str, Any]:
        """The engine's, without what the Trainer does itself."""
        config: dict[str, Any] = self.args.zero.finished(self.args, model)
        config.pop("optimizer", None)
        config["gradient_clipping"] = 0.0
        zero = config.setdefault("zero_optimization", {})
        zero["compute_grad_norm"] = False
        return config

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The config's, if it has one, in the groups of the Trainer."""
        given = self.optimizer is not None
        made = super().create_optimizer(*args, **kwargs)
        config = self.args.zero.finished(self.args, self.model)
        if given or "optimizer" not in config:
            return made
        keys = ("params", "weight_decay")
        groups = [{key: g[key] for key in keys} for g in made.param_groups]
        settings = read(config, world_size())
        self.optimizer = make_optimizer(settings, None, self.model, groups)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The config's, if it has one."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            args = self.args, self.model, num_training_steps
            settings = read(self.args.zero.finished(*args), world_size())
            self.lr_scheduler = make_scheduler(settings, None, optimizer)
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(num_training_steps, optimizer)


class Running(Making):
    """Training and evaluation, on one engine."""

    model_wrapped: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; gradients are whole if a callback looks."""
        looks = any(
            type(callback).on_pre_optimizer_step
            is not TrainerCallback.on_pre_optimizer_step
            for callback in self.callback_handler.callbacks
        )
        found = torch.tensor([float(looks)], device=device())
        comm.all_reduce(found)  # it may be on one rank alone
        self.accelerator.shows_gradients = found.item() > 0
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on the parameters that training will go on with."""
        if self.model_wrapped is self.model:
            self.create_optimizer()
            made = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped, self.optimizer = made
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Through the engine, which casts what the model is given."""
        return super().prediction_step(self.model_wrapped, *args, **kwargs)


class TrainerMixin(Running):
    """What `minizero.hf` changes in a class of trainers.

    Here are the private methods of transformers that it overrides.
    """

    _weights: Any = None

    def get_train_dataloader(self) -> Any:
        """Batches as the arguments say, which older releases forget on resuming."""
        self._train_batch_size = self.args.train_batch_size
        return super().get_train_dataloader()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'; every rank calls it, and joins what gathers weights."""
        if self.model_wrapped is not self.model:
            adapters = hasattr(self.model, "peft_config")
            self._weights = self._engine().module_state_dict(adapters)
        super().save_model(*args, **kwargs)
        self._weights = None

    def _save(self, folder: str | None = None, state_dict: Any = None) -> None:
        """The whole model, as `from_pretrained` loads it, or its adapters."""
        super()._save(folder, self._weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, folder: str) -> None:
        """The run: the engine's checkpoint, and the schedule beside it."""
        self._engine().save_checkpoint(folder)
        if self.args.should_save:
            state = self.lr_scheduler.state_dict()
            torch.save(state, Path(folder, SCHEDULER_NAME))

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        """The model, if there is no run that brings it along."""
        if not saved_run(folder):
            with self._whole():
                super()._load_from_checkpoint(folder, model)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is not None and saved_run(folder):
            self._engine().load_checkpoint(folder)
            file = Path(folder, SCHEDULER_NAME)
            state = torch.load(file, weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        if saved_run(folder):
            self._engine().load_checkpoint(folder, load_module_only=True)
        else:
            with self._whole():
                super()._load_best_model()

    def _whole(self) -> Any:
        return GatheredParameters(self.model.parameters(), modifier_rank=0)

    def _engine(self) -> Engine:
        assert isinstance(self.model_wrapped, Engine)
        return self.model_wrapped


class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """transformers' own, with a `deepspeed=` that `minizero` reads."""


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' own, on the engine."""


class Seq2SeqTrainingArguments(ArgumentsMixin, transformers.Seq2SeqTrainingArguments):
    """transformers' own, with a `deepspeed=` that `minizero` reads."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """transformers' own, on the engine."""
