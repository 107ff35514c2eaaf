"""Muon on shards: each matrix lies complete in the shard of one rank, its owner.

Muon orthogonalises the momentum of a weight matrix (Jordan et al. 2024), and so needs
all of it. A flat buffer cut at any element would cut matrices. Here their buffer is laid
out so that no shard's border runs through one: `reduce` brings a matrix's gradient to
its owner alone, the owner updates it, and `publish` or `gather` sends it, with no other
collective than any optimizer's. The price is padding: a shard is as long as the longest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .flat import Flat


class Owners:
    """Gives matrices to ranks, so that all orthogonalise about as much.

    The next costly matrix goes to the rank with the least work in its unit so far, and
    of several to the one with the least in all units.
    """

    def __init__(self) -> None:
        self.costs: list[int] = []  # of each rank, in all units

    def __call__(self, params: list[nn.Parameter], n: int) -> tuple[list[int], int]:
        """Where each matrix begins in a buffer of n shards, and a shard's size."""
        self.costs, unit_costs, filled = self.costs or [0] * n, [0] * n, [0] * n
        found: dict[int, tuple[int, int]] = {}  # parameter: (owner, place in its shard)
        # multiplications of a Newton-Schulz iteration: X Xᵀ, its square, and their X
        sizes = [sorted(p.shape) for p in params]
        costs = [2 * a * a * b + a**3 for a, b in sizes]
        for i in sorted(range(len(params)), key=lambda i: -costs[i]):
            r = min(range(n), key=lambda r: (unit_costs[r], self.costs[r], r))
            found[i] = r, filled[r]
            filled[r] += params[i].numel()
            for total in (unit_costs, self.costs):
                total[r] += costs[i]
        size = max(filled)
        return [r * size + a for _, (r, a) in sorted(found.items())], size


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, `torch.optim.AdamW` for all else, under any plan.

    params: groups, each with "use_muon", and with the options of the one or the other.
        The usual division: Muon for the weight matrices of the blocks; AdamW for
        embeddings, the output layer, biases and norms.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        groups = []
        for given in params:
            group = {"use_muon": False, **given, "params": list(given["params"])}
            kind = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            options = {k: v for k, v in given.items() if k not in ("use_muon", "params")}
            groups.append({**kind(group["params"], **options).param_groups[0], **group})
        super().__init__(groups, {})
        self.owners = Owners()
        # of each master: where its matrices begin, and their shapes
        self.matrices: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note_matrices(self, flat: Flat) -> None:
        """Remember which matrices of a buffer lie in its master, this rank's part."""
        places = ((slot.offset - flat.start, slot.shape) for slot in flat.slots)
        end = flat.master.numel()
        self.matrices[flat.master] = [at for at in places if 0 <= at[0] < end]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter, or every matrix of a shard, that has a gradient."""
        for group in self.param_groups:
            if group["use_muon"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad, group)
            elif group["params"]:
                adam = torch.optim.AdamW(group["params"])
                adam.param_groups, adam.state = [group], self.state
                adam.step()

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Let torch's Muon update the matrices that lie in `p`."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        muon = torch.optim.Muon([torch.empty(0, 0)])
        matrices = muon.param_groups[0] = {**group, "params": []}
        for start, shape in self.matrices.get(p, [(0, p.shape)]):
            value, value.grad, momentum = (
                t.detach().view(-1)[start : start + shape.numel()].view(shape)
                for t in (p, grad, state["momentum_buffer"])
            )
            matrices["params"].append(value)
            muon.state[value] = {"momentum_buffer": momentum}
        muon.step()
