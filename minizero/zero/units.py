"""Which modules communicate together, and which parameters share a buffer."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .flat import Named

Policy = Callable[[nn.Module], bool]


def find_units(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """The outermost modules that `policy` accepts; the root is "".

    By default these are the children of `nn.ModuleList` and `nn.Sequential`,
    which is where models keep their blocks.
    """
    found = {"": model}

    def search(name: str, module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for key, child in module.named_children():
            full = f"{name}.{key}" if name else key
            chosen = policy(child) if policy else listed
            one = chosen and not isinstance(child, nn.ModuleList)
            if one and any(True for _ in child.parameters()):
                found[full] = child
            else:
                search(full, child)

    search("", model)
    return found


def assign(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, Named]:
    """The parameters of each unit; one that units share is the root's."""
    owner: dict[nn.Parameter, str] = {}
    inside = {
        module: name
        for name, unit in units.items()
        for module in (unit.modules() if name else ())
    }
    for module in model.modules():
        for p in module.parameters(recurse=False):
            unit = inside.get(module, "")
            owner[p] = unit if owner.get(p, unit) == unit else ""
    parts: dict[str, Named] = {name: [] for name in units}
    for name, p in model.named_parameters():
        parts[owner[p]].append((name, p))
    return parts


def split(
    named: Named, group_of: dict[nn.Parameter, int]
) -> list[tuple[int | None, Named]]:
    """Cut a unit's parameters into lists that can share one flat buffer."""
    parts: dict[object, Named] = {}
    for name, p in named:
        group = group_of.get(p)
        if p.requires_grad and group is None:
            raise ValueError(
                f"parameter {name!r} requires a gradient but is in no group "
                "of the optimizer; add it there, or freeze it by "
                "requires_grad_(False)"
            )
        key = p.dtype, p.device, p.requires_grad, group
        parts.setdefault(key, []).append((name, p))
    return [(group_of.get(part[0][1]), part) for part in parts.values()]
