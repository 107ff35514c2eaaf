"""Make units and flat buffers of a model, and point its optimizer at the shards.

Which modules communicate together, and which of their parameters share a buffer; then
the optimizer: whether it can update shards at all, its groups, and its state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import comm
from ..memory import labels
from ..ranks import device
from .flat import Flat, Layout, Named, Unit, in_order
from .muon import Muon

Policy = Callable[[nn.Module], bool]


def find_units(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """The outermost modules that `policy` accepts; the root is "".

    By default the children of `nn.ModuleList` and `nn.Sequential`: a model's blocks. A
    ModuleList itself, which has no forward, and modules without parameters never are.
    """
    found = {"": model}

    def search(name: str, module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for key, child in module.named_children():
            full = f"{name}.{key}" if name else key
            one = policy(child) if policy else listed
            if one and not isinstance(child, nn.ModuleList) and [*child.parameters()]:
                found[full] = child
            else:
                search(full, child)

    search("", model)
    return found


def params_by_unit(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, Named]:
    """The parameters of each unit; one that units share is the root's."""
    owner: dict[nn.Parameter, str] = {}
    for unit, module in model.named_modules():
        while unit not in units:
            unit = unit.rpartition(".")[0]
        for p in module.parameters(recurse=False):
            owner[p] = unit if owner.get(p, unit) == unit else ""
    parts: dict[str, Named] = {name: [] for name in units}
    for name, p in model.named_parameters():
        parts[owner[p]].append((name, p))
    return parts


def split_by_buffer(
    named: Named, group_of: dict[nn.Parameter, int]
) -> list[tuple[int | None, Named]]:
    """Cut a unit's parameters into lists that can share one flat buffer."""
    parts: dict[object, Named] = {}
    for name, p in named:
        group = group_of.get(p)
        if p.requires_grad and group is None:
            raise ValueError(
                f"parameter {name!r} requires a gradient but is in no group of the "
                "optimizer; add it there, or freeze it by requires_grad_(False)"
            )
        key = p.dtype, p.device, p.requires_grad, group
        parts.setdefault(key, []).append((name, p))
    return [(group_of.get(part[0][1]), part) for part in parts.values()]


def users_of(unit: Unit, model: nn.Module) -> list[nn.Module]:
    """The modules around whose forward a unit is unsharded.

    For the root also each layer that has its parameters: a loss may call one directly.
    """
    if unit.module is not model:
        return [unit.module]
    own = {p for flat in unit.flats for p in flat.parameters}
    return [m for m in model.modules() if m is model or own & {*m._parameters.values()}]


def build_units(net: Any, policy: Policy | None) -> list[Unit]:
    """Units with flat buffers that have rank 0's values, stored as a net's plan says.

    net: a `DataParallel` under construction; its `owned` says which part of a buffer
        this rank updates, its `allocate` makes what stays between steps.
    """
    group_of = groups_of(net.model, net.optimizer)
    modules, units = find_units(net.model, policy), []
    with comm.phase("init"):
        for name, params in params_by_unit(net.model, modules).items():
            for _, p in params:
                p.data = p.data.to(device())
            units.append(unit := Unit(name or "root", modules[name]))
            for group, part in split_by_buffer(params, group_of):
                layout = layout_of(net.optimizer, group, net.grid.copies)
                flat = net.flat_type(part, group, layout, net.grid.within)
                flat.grid = net.grid
                unit.flats.append(flat)
                comm.broadcast(flat.full, group=net.group)
                own = net.owned(flat.full, flat)
                flat.start = int(own.storage_offset())
                master = net.precision.attach(flat, own)
                flat.shard = net.owned(flat.full, flat)
                net.allocate(flat)
                flat.master = flat.shard
                if flat.trainable:
                    flat.master = net.storage.master(flat, master)
                if isinstance(net.optimizer, Muon):
                    net.optimizer.note_matrices(flat)
        for module in net.model.modules():
            for buffer in module.buffers(recurse=False):
                buffer.data = values = buffer.data.to(device())
                if not values.is_contiguous():  # the layout decides how products round
                    values = values.new_empty(0).set_(values.untyped_storage())
                comm.broadcast(values, group=net.group)
                labels.label(buffer, "buffers")
                net.precision.attach_buffer(buffer, module)
    return units


def twin_of(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any
) -> Optimizer:
    """A copy with all attributes of the optimizer's class, other groups and state."""
    made = copy.copy(optimizer)  # which has torch's attributes only
    vars(made).update(vars(optimizer) | vars(made))
    vars(made).pop("step", None)  # a learning rate scheduler's, which counts
    made.param_groups, made.state = groups, state
    return made


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose update of an element depends on others.

    A shard is a piece of flattened parameters, so the optimizer must do the same to a
    matrix as to its pieces. This tries each group of options on a small matrix.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, Muon) and group["use_muon"]:
            continue
        problem = "it would update a matrix and its pieces differently"
        try:
            if _same_on_pieces(optimizer, group):
                continue
        except Exception as error:
            problem = str(error)
        advice = "use an element-wise optimizer such as AdamW or SGD"
        if isinstance(optimizer, torch.optim.Muon):
            advice = "use minizero.zero.Muon, which leaves matrices whole"
        raise ValueError(
            f"{type(optimizer).__name__} needs the shape of a parameter, and shards are "
            f"pieces of flattened ones ({problem}); {advice}"
        )


def _same_on_pieces(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a matrix and its flat pieces get the same updates."""
    generator = torch.Generator().manual_seed(0)
    # where the parameters are: a capturable optimizer works nowhere else
    where = next((p.device for p in group["params"]), None)
    start, *grads = torch.randn(4, 4, 6, generator=generator).to(where)
    matrix = nn.Parameter(start)
    pieces = [nn.Parameter(part.clone()) for part in start.flatten().split([10, 14])]
    # a small learning rate, or none in a warm-up, would hide any difference
    options = {**group, "lr": 0.1} if "lr" in group else group
    groups = [[{**options, "params": params}] for params in ([matrix], pieces)]
    twins = [twin_of(optimizer, group, defaultdict(dict)) for group in groups]
    for matrix.grad in grads:
        pieces[0].grad, pieces[1].grad = matrix.grad.flatten().split([10, 14])
        for each in twins:
            each.step()
    return torch.allclose(matrix.flatten(), torch.cat([*pieces]), rtol=1e-4)


def state_layout(
    optimizer: Optimizer, group: dict[str, Any], like: Tensor
) -> dict[str, torch.dtype]:
    """Names and dtypes of the states per element, as a step made here creates them."""
    p = nn.Parameter(torch.zeros(3, dtype=like.dtype, device=like.device))
    p.grad = torch.ones_like(p)
    state: Any = defaultdict(dict)
    twin_of(optimizer, [{**group, "params": [p]}], state).step()
    found = state[p].items()
    return {k: v.dtype for k, v in found if isinstance(v, Tensor) and v.shape == (3,)}


def groups_of(model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """The optimizer group of each parameter; ValueError if it has others, or stepped."""
    if any(state.get("step", 1) for state in optimizer.state.values() if state):
        raise ValueError(
            f"{type(optimizer).__name__} has made steps, and its state cannot be "
            "sharded any more; wrap the model before, or load a checkpoint after"
        )
    groups = enumerate(optimizer.param_groups)
    group_of = {p: index for index, group in groups for p in group["params"]}
    for p in group_of.keys() - {*model.parameters()}:
        raise ValueError(
            f"the optimizer's group {group_of[p]} has a parameter of shape "
            f"{tuple(p.shape)} that is not the model's; make the optimizer over "
            "model.parameters()"
        )
    return group_of


def layout_of(optimizer: Optimizer, group: int | None, copies: int) -> Layout:
    """How to lay out a flat buffer of one of the optimizer's groups.

    `copies`: how many groups of ranks keep the buffer; a shard is as many equal pieces.
    """
    options = optimizer.param_groups[group] if group is not None else {}
    # fused kernels round a tail below 64 bytes differently, so no piece may have one
    lay, multiple = in_order, 32 if options.get("fused") else 1
    if isinstance(optimizer, Muon) and options.get("use_muon"):
        lay, multiple = optimizer.owners, 1

    def layout(params: list[nn.Parameter], n: int) -> tuple[list[int], int]:
        offsets, piece = lay(params, n * copies)
        return offsets, -(-piece // multiple) * multiple * copies

    return layout


def point_at_shards(optimizer: Optimizer, flats: list[Flat], storage: Any) -> None:
    """Point the optimizer's groups and state at what this rank updates.

    Most optimizers have no state yet; Adagrad makes it at construction.
    """
    for group in optimizer.param_groups:
        group["params"] = []
    for flat in flats:
        assert flat.group is not None
        optimizer.param_groups[flat.group]["params"].append(flat.master)
        states = [optimizer.state.pop(slot.parameter, {}) for slot in flat.slots]
        for key, value in states[0].items():  # one value for all elements, so far
            like = value if key == "step" else flat.master
            value = torch.full_like(like, value.flatten()[:1].sum().item())
            if value.ndim:
                value = storage.store(value, "optimizer")
            optimizer.state[flat.master][key] = value
