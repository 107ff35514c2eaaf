"""How parameters are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .schema import key

_SHAPES = "its update needs the shapes of parameters, and shards have none"
_SPARSE = "nothing is compressed on its way"
_MUP = "make it with the package mup"
_FUSED = "use Adam or AdamW, which are fused unless torch_adam is true"
_HOST = 'use Adam or AdamW with "offload_optimizer": {"device": "cpu"}'


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Adam with decoupled weight decay, unless adam_w_mode is false."""

    lr: float = key(1e-3, "Learning rate.", "`lr`", least=0)
    betas: tuple[float, float] = key(
        (0.9, 0.999),
        "Decay of the averages of the gradient and of its square.",
        "`betas`",
        least=0,
        most=1,
    )
    eps: float = key(1e-8, "Added to the root.", "`eps`", least=0)
    weight_decay: float = key(
        None,
        "Weight decay.",
        "`weight_decay`",
        least=0,
        unset="0, and with torch_adam what torch's class has",
    )
    adam_w_mode: bool = key(
        True,
        "Decoupled weight decay for the type Adam too.",
        "`torch.optim.AdamW`, else `Adam`",
    )
    torch_adam: bool = key(
        False,
        "torch's own implementation, not a fused kernel.",
        "`fused`, left to torch",
    )
    fused: bool | None = key(
        None,
        "torch's fused kernel.",
        "`fused`",
        unset="true, and with torch_adam left to torch",
    )
    fp32_optimizer_states: bool = key(
        True,
        "fp32 states on the host.",
        ignored="they have the dtype of what is updated: fp32",
    )


@dataclass(frozen=True, kw_only=True)
class SGDParams:
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    lr: float = key(1e-3, "Learning rate.", "`lr`", least=0)
    momentum: float = key(
        0.0, "Decay of the momentum.", "`momentum`", least=0
    )
    dampening: float = key(
        0.0, "Taken off a gradient that joins the momentum.", "`dampening`"
    )
    weight_decay: float = key(0.0, "L2 penalty.", "`weight_decay`", least=0)
    nesterov: bool = key(False, "Nesterov momentum.", "`nesterov`")
    fused: bool | None = key(
        None, "torch's fused kernel.", "`fused`", unset="left to torch"
    )


OPTIMIZERS: dict[str, type] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How parameters are updated, unless `initialize` is given that."""

    type: str = key(
        ...,
        "Which optimizer.",
        "`torch.optim`",
        one_of=tuple(OPTIMIZERS),
        advice={
            "": "pass another element-wise optimizer to minizero.initialize",
            "fusedadam": _FUSED,
            "cpuadam": _HOST,
            "deepspeedcpuadam": _HOST,
            "lamb": f"{_SHAPES}; use AdamW",
            "muon": f"{_SHAPES}; use AdamW",
            "onebitlamb": f"{_SHAPES}; use AdamW",
            "onebitadam": f"{_SPARSE}; use AdamW",
            "zerooneadam": f"{_SPARSE}; use AdamW",
            "muadam": f"{_MUP}, and pass it to minizero.initialize",
            "muadamw": f"{_MUP}, and pass it to minizero.initialize",
            "musgd": f"{_MUP}, and pass it to minizero.initialize",
        },
    )
    params: AdamParams | SGDParams = key(
        None,
        "Its options.",
        "the arguments of the class",
        variants=OPTIMIZERS,
        unset="all at their defaults",
    )
    legacy_fusion: bool = key(
        False,
        "The older way of fusing fp16 updates.",
        ignored="there is one way",
    )

    def torch_call(self) -> tuple[str, dict[str, Any]]:
        """A class in torch.optim, and its arguments but the parameters."""
        options = dict(vars(self.params))
        options.pop("fp32_optimizer_states", None)
        if isinstance(self.params, SGDParams):
            return "SGD", options
        own = options.pop("torch_adam")
        decoupled = options.pop("adam_w_mode") or self.type == "AdamW"
        if options["fused"] is None:
            options["fused"] = None if own else True
        if options["weight_decay"] is None:
            # left out, torch's AdamW takes 0.01
            options["weight_decay"] = 0.01 if own and decoupled else 0.0
        return ("AdamW" if decoupled else "Adam"), options
