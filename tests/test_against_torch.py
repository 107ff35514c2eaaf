"""Drawn models, plans and scripts: as plain torch does, or refused in a sentence.

A script trains for three steps and meanwhile does to the model, its parameters and
their gradients what people do. Where it cannot be what torch makes of it, an error says
so; nothing else may happen. AGAINST_TORCH=5000 draws more.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from minizero import parallelize
from minizero.memory.plan import Plan
from minizero.offload import Offload
from minizero.ranks.launch import Pool, rank, world_size
from minizero.zero import GatheredParameters

EXAMPLES = int(os.environ.get("AGAINST_TORCH", 500))
STEPS, WIDTH, WORDS = 3, 4, 5

TRAITS = [
    "tied",
    "frozen",
    "scalar",
    "float64",
    "buffers",
    "hooked",
    "parametrized",
    "unused",
    "twice",
    "skips",
    "max_norm",
    "clamps",
]


class Zoo(nn.Module):
    def __init__(self, traits: set[str]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.traits, self.step = traits, 0
        norm = 1.0 if "max_norm" in traits else None
        self.tokens = nn.Embedding(WORDS, WIDTH, max_norm=norm)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.one = nn.Parameter(torch.ones(1))
        if "tied" in traits:
            self.head.weight = self.tokens.weight
        if "frozen" in traits:
            self.blocks[1].requires_grad_(False)
            self.one.requires_grad_(False)
        if "scalar" in traits:
            self.scalar = nn.Parameter(torch.tensor(1.5))
        if "float64" in traits:
            self.blocks[1].double()
        if "unused" in traits:
            self.spare = nn.Parameter(torch.randn(3))
        if "buffers" in traits:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("none", None)
            self.register_buffer("passing", torch.ones(2), persistent=False)
        if "parametrized" in traits:
            weight_norm(self.blocks[0])
        if "hooked" in traits:
            self.blocks[2].register_forward_hook(lambda m, _, out: out + m.weight.sum())

    def forward(self, x: Tensor) -> Tensor:
        if "clamps" in self.traits:
            with torch.no_grad():
                self.one.clamp_(0.5, 0.9)
        h = self.tokens(x) * self.one
        a, b, c = self.blocks
        if "buffers" in self.traits:
            self.count += 1
            self.mean.mul_(0.5).add_(h.detach().mean(0))
            h = h - self.mean
        h = torch.tanh(a(a(h)) if "twice" in self.traits else a(h))
        if "skips" not in self.traits or self.step != 1:
            h = b(h.to(b.weight.dtype)).to(h.dtype)
        h = c(h) * (self.scalar if "scalar" in self.traits else 1)
        return self.head(h).square().mean()


@dataclass
class Torch:
    """The loop in plain torch; `Net` is the same on minizero."""

    model: Zoo
    optimizer: torch.optim.Optimizer

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


class Net(Torch):
    def __init__(
        self, model: Zoo, optimizer: torch.optim.Optimizer, stage: int, offload: bool
    ) -> None:
        super().__init__(model, optimizer)
        plan = Plan.stage(stage, "cpu") if offload and stage else Plan.stage(stage)
        home = Offload(plan) if offload and stage else None
        self.net = parallelize(model, optimizer, plan, home=home)

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x)

    def backward(self, loss: Tensor) -> None:
        self.net.backward(loss)

    def clip(self) -> None:
        self.net.clip_grad_norm(0.01)

    def update(self) -> None:
        self.net.step()

    def state(self) -> dict[str, Tensor]:
        return self.net.state_dict()


def last(model: Zoo) -> nn.Parameter:
    return model.blocks[2].weight


def freeze(loop: Torch, frozen: bool) -> None:
    loop.model.blocks[2].requires_grad_(not frozen)
    loop.model.one.requires_grad_(not frozen)


def thaw(loop: Torch) -> None:
    loop.model.blocks[1].requires_grad_()


def drop(loop: Torch) -> None:
    last(loop.model).grad = None


def double_grad(loop: Torch) -> None:
    grad = last(loop.model).grad
    if grad is not None:
        grad.mul_(2)


def grad_data(loop: Torch) -> None:
    grad = last(loop.model).grad
    if grad is not None:
        grad.data = grad.data * 2


def set_grad(loop: Torch) -> None:
    last(loop.model).grad = torch.ones(WIDTH, WIDTH)


def set_data(loop: Torch) -> None:
    last(loop.model).data = torch.full((WIDTH, WIDTH), 0.25)


def exchange(loop: Torch) -> None:
    a, b = loop.model.tokens.weight, loop.model.head.weight
    if a is not b and not nn.utils.parametrize.is_parametrized(loop.model.head):
        a.data, b.data = b.data, a.data


def from_vector(loop: Torch) -> None:
    params = list(loop.model.blocks[2].parameters())
    nn.utils.vector_to_parameters(torch.arange(20.0) / 20, params)


def replace(loop: Torch) -> None:
    loop.model.blocks[2].weight = nn.Parameter(torch.eye(WIDTH))


def untie(loop: Torch) -> None:
    head = loop.model.head
    if loop.model.tokens.weight is head.weight:
        head.weight = nn.Parameter(torch.ones(WORDS, WIDTH))


def other_head(loop: Torch) -> None:
    torch.manual_seed(9)
    loop.model.head = nn.Linear(WIDTH, WORDS, bias=False)


def assign(loop: Torch) -> None:
    state = {k: v.clone() for k, v in Zoo(loop.model.traits).state_dict().items()}
    loop.model.load_state_dict(state, assign=True)


def double(loop: Torch) -> None:
    loop.model.double()


def clamp(loop: Torch) -> None:
    with torch.no_grad():
        last(loop.model).clamp_(-0.1, 0.1)
        loop.model.one.clamp_(0.5, 0.9)


def clip_by_torch(loop: Torch) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)


def own_step(loop: Torch) -> None:
    loop.optimizer.step()


def new_group(loop: Torch) -> None:
    extra = nn.Parameter(torch.zeros(2))
    loop.optimizer.add_param_group({"params": [extra]})


def late_hook(loop: Torch) -> None:
    block = loop.model.blocks[0]
    block.register_forward_hook(lambda m, _, out: out + m.bias.sum())
    block.register_forward_pre_hook(lambda m, args: (args[0] + m.bias,), prepend=True)


def parametrize(loop: Torch) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.0

    nn.utils.parametrize.register_parametrization(loop.model.head, "weight", Same())


def deep_copy(loop: Torch) -> None:
    twin = copy.deepcopy(loop.model)
    with torch.no_grad():
        loop.seen.append(twin(torch.arange(WORDS)))  # type: ignore[attr-defined]


def swap(loop: Torch) -> None:
    """Evaluate with other weights, and go back."""
    p = last(loop.model)
    kept, p.data = p.data, torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        loop.seen.append(loop.loss(torch.arange(WORDS)))  # type: ignore[attr-defined]
    p.data = kept


def count_hooks(loop: Torch) -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        getattr(loop.optimizer, register)(
            lambda *_: loop.seen.append(torch.ones(()))  # type: ignore[attr-defined]
        )


# what is done, and at which stages it may be refused
ANY, SHARDED = {0, 1, 2, 3}, {3}
ACTIONS: dict[str, tuple[Callable[[Torch], None], set[int]]] = {
    "freeze": (partial(freeze, frozen=True), set()),
    "unfreeze": (partial(freeze, frozen=False), set()),
    "thaw": (thaw, set()),  # with offload: see `allowed`
    "model.zero_grad": (lambda loop: loop.model.zero_grad(), set()),
    "model.zero_grad(False)": (lambda loop: loop.model.zero_grad(False), set()),
    "optimizer.zero_grad": (lambda loop: loop.optimizer.zero_grad(), set()),
    "optimizer.zero_grad(False)": (lambda loop: loop.optimizer.zero_grad(False), set()),
    "drop": (drop, set()),
    "double grad": (double_grad, ANY),
    "grad.data": (grad_data, ANY),
    "set grad": (set_grad, ANY),
    "set data": (set_data, SHARDED),
    "exchange": (exchange, SHARDED),
    "from vector": (from_vector, SHARDED),
    "replace": (replace, ANY),
    "untie": (untie, ANY),
    "other head": (other_head, ANY),
    "assign": (assign, ANY),
    "double": (double, ANY),
    "clamp": (clamp, SHARDED),
    "clip by torch": (clip_by_torch, ANY),
    "own step": (own_step, ANY),
    "new group": (new_group, ANY),
    "late hook": (late_hook, set()),
    "parametrize": (parametrize, SHARDED),
    "deepcopy": (deep_copy, SHARDED),
    "swap": (swap, SHARDED),
    "count hooks": (count_hooks, set()),
    "share memory": (lambda loop: loop.model.share_memory(), {2, 3}),
    "clip": (lambda loop: loop.clip(), set()),
}
MOMENTS = ["before", "after forward", "after backward", "at the end"]
# of these, some elements rest while others of their buffer are updated: Adam's `step`
# is the buffer's
RESTING = {
    "model.zero_grad",
    "optimizer.zero_grad",
    "drop",
    "freeze",
    "thaw",
    "unfreeze",
    "skips",
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5),
}


@dataclass(frozen=True)
class Script:
    """`actions`: in which step, in which moment of it, what."""

    stage: int
    traits: frozenset[str] = frozenset()
    actions: tuple[tuple[int, str, str], ...] = ()
    optimizer: str = "momentum"
    micro_batches: int = 1
    groups: bool = False
    offload: bool = False

    def allowed(self) -> bool:
        """Whether it may be refused."""
        names = {name for _, _, name in self.actions}
        thawed = names & {"thaw", "unfreeze"} and "frozen" in self.traits
        if thawed and self.stage and self.offload:
            return True
        if self.traits & {"max_norm", "clamps"} and world_size() > 1:
            return True
        return any(self.stage in ACTIONS[name][1] for name in names)


def make(script: Script, **how: Any) -> Torch:
    model = Zoo(set(script.traits))
    params = list(model.parameters())
    groups: Any = params
    if script.groups:
        matrices = [p for p in params if p.ndim > 1]
        others = [p for p in params if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "lr": 0.02}]
    optimizer = OPTIMIZERS[script.optimizer](groups)
    loop = Net(model, optimizer, **how) if how else Torch(model, optimizer)
    loop.seen = []  # type: ignore[attr-defined]
    return loop


def run(script: Script, loop: Torch, batch: Callable[[int], list[Tensor]]) -> str:
    """Losses are left in `loop.seen`; returns the error that ended it."""

    def act(step: int, moment: str) -> None:
        for at, when, name in script.actions:
            if (at, when) == (step, moment):
                ACTIONS[name][0](loop)

    try:
        for step in range(STEPS):
            loop.model.step = step
            act(step, "before")
            for micro in range(script.micro_batches):
                rows = batch(step * 2 + micro)
                loss = sum(loop.loss(x) for x in rows) / len(rows)
                if micro == 0:
                    act(step, "after forward")
                loop.seen.append(loss.detach())  # type: ignore[attr-defined]
                loop.backward(loss / script.micro_batches)
                if micro == 0:
                    act(step, "after backward")
            loop.update()
            act(step, "at the end")
        loop.state()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error) or repr(error)
    return ""


def data(number: int, r: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + r)
    return torch.randint(WORDS, (3,), generator=generator)


def faults(script: Script) -> list[str]:
    """How it differs from torch, on this many ranks."""
    every = range(world_size())
    plain = make(script)
    failed = run(script, plain, lambda n: [data(n, r) for r in every])
    net = make(script, stage=script.stage, offload=script.offload)
    refused = run(script, net, lambda n: [data(n, rank())])
    if refused:
        if failed or (script.allowed() and is_sentence(refused)):
            return []
        return [f"refused: {refused}"]
    if failed:
        return [f"torch says: {failed}"]
    found = []
    if world_size() == 1:
        found += differing("seen", net.seen, plain.seen)  # type: ignore[attr-defined]
    expected, got = plain.state(), net.state()
    if rank() == 0:
        found += [f"names: {expected.keys() ^ got.keys()}"] * (
            expected.keys() != got.keys()
        )
        for name in expected.keys() & got.keys():
            found += differing(name, [got[name]], [expected[name]])
    return found


def differing(name: str, got: list[Tensor], expected: list[Tensor]) -> list[str]:
    if len(got) != len(expected):
        return [f"{name}: {len(got)}, not {len(expected)}"]
    pairs = zip(got, expected, strict=True)
    same = [torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs]
    return [] if all(same) else [f"{name}: {got}, not {expected}"]


def is_sentence(text: str) -> bool:
    """Says what is wrong and what to do."""
    return len(text.split()) > 12 and any(mark in text for mark in ";,")


@st.composite
def scripts(draw: Callable[..., Any]) -> Script:
    traits = draw(st.frozensets(st.sampled_from(TRAITS), max_size=4))
    one = st.tuples(
        st.integers(0, STEPS - 1),
        st.sampled_from(MOMENTS),
        st.sampled_from(sorted(ACTIONS)),
    )
    actions = tuple(draw(st.lists(one, max_size=3)))
    optimizers = list(OPTIMIZERS)
    if RESTING & ({name for _, _, name in actions} | traits):
        optimizers.remove("adamw")
    return Script(
        draw(st.integers(0, 3)),
        traits,
        actions,
        draw(st.sampled_from(optimizers)),
        draw(st.integers(1, 2)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="AGAINST_TORCH" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@drawn
@given(scripts())
def test_as_torch_or_refused(script: Script) -> None:
    assert faults(script) == []


def one(
    stage: int, name: str, moment: str = "before", *traits: str, **more: Any
) -> Script:
    return Script(stage, frozenset(traits), ((1, moment, name),), **more)


KNOWN = {
    "frozen": one(1, "freeze"),
    "frozen, then not": Script(
        2, frozenset(), ((0, "before", "freeze"), (1, "before", "unfreeze"))
    ),
    "unfrozen": one(2, "thaw", "before", "frozen"),
    "unfrozen, absent": one(3, "thaw", "before", "frozen"),
    "model.zero_grad": one(0, "model.zero_grad", "after backward"),
    "model.zero_grad, sharded": one(
        3, "model.zero_grad", "after backward", micro_batches=2
    ),
    "to zero": one(2, "model.zero_grad(False)", "after backward"),
    "optimizer to zero": one(1, "optimizer.zero_grad(False)", "after backward"),
    "optimizer.zero_grad": one(
        1, "optimizer.zero_grad", "after backward", micro_batches=2
    ),
    "a gradient of None": one(3, "drop", "after backward", micro_batches=2),
    "the optimizer's own step": one(1, "own step", "after backward"),
    "another group": one(0, "new group"),
    "p.data": one(1, "set data"),
    "p.data, absent": one(3, "set data"),
    "shared memory": one(2, "share memory", "after backward"),
    "p.data of two": one(1, "exchange"),
    "p.grad.data": one(0, "grad.data", "after backward"),
    "vector_to_parameters": one(0, "from vector"),
    "other values, then a norm": Script(
        0,
        frozenset(),
        ((2, "after forward", "from vector"), (2, "after forward", "clip")),
    ),
    "another parameter": one(1, "replace"),
    "one of two names": one(3, "untie", "before", "tied"),
    "another module": one(1, "other head"),
    "load_state_dict(assign=True)": one(0, "assign"),
    "model.double": one(2, "double"),
    "max_norm": Script(1, frozenset(["max_norm"])),
    "max_norm, absent": Script(3, frozenset(["max_norm"])),
    "clamped in the forward": Script(3, frozenset(["clamps"])),
    "clip_grad_norm_": one(1, "clip by torch", "after backward"),
    "clip_grad_norm_, sharded": one(2, "clip by torch", "after backward"),
    "clip_grad_norm_, absent": one(3, "clip by torch", "after backward"),
    "unused under weight decay": Script(1, frozenset(["unused"])),
    "unused under AdamW": Script(1, frozenset(["unused"]), optimizer="adamw"),
    "skipped under momentum": Script(3, frozenset(["skips"])),
    "a gradient set where none comes": Script(
        0, frozenset(), ((0, "before", "freeze"), (0, "before", "set grad"))
    ),
    "a gradient set between micro-batches": one(
        0, "set grad", "after backward", micro_batches=2
    ),
    "forward hooks registered later": one(3, "late hook"),
    "deepcopy": one(3, "deepcopy"),
    "step hooks with offload": one(2, "count hooks", offload=True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults(name: str) -> None:
    assert faults(KNOWN[name]) == []


def looked_up(stage: int) -> str | Tensor:
    """The rows after each rank has scaled those it looks up; or why not."""
    loop = make(Script(0, frozenset(["max_norm"])), stage=stage, offload=False)
    try:
        loop.loss(torch.tensor([rank()]))
        loop.loss(torch.tensor([rank()]))
    except RuntimeError as error:
        return str(error)
    with GatheredParameters(loop.model.tokens.weight):
        return loop.model.tokens.weight.detach().clone()


def test_ranks_that_write_in_a_forward_do_not_come_apart(two: Pool) -> None:
    for stage in range(4):
        a, b = two.run(looked_up, stage)
        if isinstance(a, str) and isinstance(b, str):
            assert a == b and is_sentence(a) and "tokens.weight" in a
        else:
            assert torch.equal(a, b), stage


def of_all(every: list[Script]) -> list[list[str]]:
    return [faults(script) for script in every]


def test_on_two_ranks(two: Pool) -> None:
    for found in two.run(of_all, list(KNOWN.values())):
        assert dict(zip(KNOWN, found, strict=True)) == dict.fromkeys(KNOWN, [])
