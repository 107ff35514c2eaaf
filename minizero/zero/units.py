"""Which modules communicate together, and which parameters share a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

Policy = Callable[[nn.Module], bool]


def find_units(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """The outermost modules that `policy` accepts; the root under "".

    By default these are the children of `nn.ModuleList` and of
    `nn.Sequential`, which is where models keep their blocks.
    """
    found: dict[str, nn.Module] = {"": model}
    waiting = children("", model)[::-1]  # not recursive: some models are deep
    while waiting:
        name, module, listed = waiting.pop()
        chosen = policy(module) if policy else listed
        is_one = chosen and not isinstance(module, nn.ModuleList)
        if is_one and any(True for _ in inside(module)):
            found[name] = module
        else:
            waiting += children(name, module)[::-1]
    return found


def own(module: nn.Module) -> list[nn.Parameter]:
    """Its own parameters; torch's generators take ten times as long."""
    return [p for p in module._parameters.values() if p is not None]


def named(model: nn.Module) -> dict[nn.Module, str]:
    """All modules in order, with their first full names, likewise."""
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module not in found:
            found[module] = name
            if module._modules:
                prefix, below = f"{name}." if name else "", module._modules.items()
                waiting += [(prefix + k, m) for k, m in below if m is not None][::-1]
    return found


def inside(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those of all modules in it, shared ones more than once."""
    for each in named(module) if module._modules else (module,):
        yield from own(each)


def children(name: str, module: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Full names, modules, and whether they are in a list or a sequence."""
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    prefix = f"{name}." if name else ""
    return [(prefix + key, m, listed) for key, m in module.named_children()]


Units = dict[str, dict[str, nn.Module]]
MANY, SMALL = 256, 100_000  # blocks of a model, elements of a unit


def units_of(model: nn.Module, policy: Policy | None = None) -> Units:
    """The modules of each unit, with their names; first the root, "".

    They are what `find_units` finds, each alone if there is a policy. Without
    one, in a model of more than `MANY` blocks, neighbours in one list share a
    unit until it has `SMALL` elements: alone they would not be worth the
    fixed cost of their collectives.
    """
    found = find_units(model, policy)
    runs, place, size = [{"": found.pop("")}], "", SMALL
    shares = policy is None and len(found) > MANY
    for name, module in found.items():
        before, place = place, name.rpartition(".")[0]
        if not shares or place != before or size >= SMALL:
            runs.append({})
            size = 0
        runs[-1][name] = module
        size += sum(p.numel() for p in inside(module))
    return {_name(list(run)): run for run in runs}


def _name(modules: list[str]) -> str:
    """A module's, or those of the first and the last: "blocks.0-9"."""
    first, last = modules[0], modules[-1].rpartition(".")[2]
    return first if len(modules) == 1 else f"{first}-{last}"


def assign(model: nn.Module, units: Units) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit, each once, under its first name.

    A parameter that the root shares with a unit (a tied head) is the root's.
    """
    owner: dict[nn.Parameter, str] = {}
    modules = {full: name for name, run in units.items() for full in run}
    for full, unit_name in modules.items():
        for p in inside(units[unit_name][full]) if unit_name else ():
            if owner.setdefault(p, unit_name) != unit_name:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is in unit "
                    f"{owner[p]!r} and in unit {unit_name!r}; make one unit "
                    "of both, or pass a `units` policy that leaves both to "
                    "the root"
                )
    waiting = [("", model)]
    while waiting:  # what is reached without entering a unit is the root's
        name, module = waiting.pop()
        owner.update((p, "") for p in own(module))
        below = children(name, module)
        waiting += [(full, m) for full, m, _ in below if full not in modules]
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in units}
    for module, name in named(model).items():
        prefix = f"{name}." if name else ""
        for key, one in module._parameters.items():
            if one in owner:  # and under no other name before
                parts[owner.pop(one)].append((prefix + key, one))
    return parts


NO_GROUP = (
    "parameter {!r} requires a gradient but is in no group of the optimizer; "
    "add it there, or set requires_grad to False"
)


def split(
    named: list[tuple[str, nn.Parameter]], group_of: dict[nn.Parameter, int]
) -> list[tuple[int | None, list[tuple[str, nn.Parameter]]]]:
    """Cut a unit's parameters into what can share one flat buffer.

    One buffer needs one dtype, one device, one answer to `requires_grad` and
    one optimizer group.
    """
    parts: dict[object, list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        group = group_of.get(p)
        if p.requires_grad and group is None:
            raise ValueError(NO_GROUP.format(name))
        key = (p.dtype, p.device, p.requires_grad, group)
        parts.setdefault(key, []).append((name, p))
    return [(group_of.get(part[0][1]), part) for part in parts.values()]
