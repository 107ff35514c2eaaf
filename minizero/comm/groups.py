"""Groups of ranks: all of them, or those between which a collective takes place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ranks.launch import rank, world_size


@dataclass(frozen=True)
class Group:
    """Some of the ranks, in order; `name` is what the ledger calls them.

    Only these ranks make a collective of the group, and they all make the same ones in
    the same order. Other groups need not make as many. The rows of a buffer are as many
    as the ranks of its group.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The place of this process in the group, from 0."""
        return self.ranks.index(rank())

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)


@lru_cache
def _all(ranks: int) -> Group:
    return Group("all", tuple(range(ranks)))


def everyone() -> Group:
    """The group of all ranks, in which collectives take place by default."""
    return _all(world_size())


class Groups:
    """All ranks, or those of `among`, as a grid: each row is a group of neighbors.

    `within`: this rank's row, `size` neighbors such as the GPUs of a server. `across`:
    its column, the ranks at the same place of the other rows. Of a buffer of N shards
    that each row keeps once, the rank at place j keeps shards j·R to (j+1)·R - 1, where
    R, `copies`, is the number of rows.

    Raises ValueError unless `size` divides the number of ranks.
    """

    def __init__(self, size: int, among: Group | None = None) -> None:
        every = among or everyone()
        ranks, n = every.ranks, every.size
        if not 1 <= size <= n or n % size:
            fits = [str(g) for g in range(2, n + 1) if n % g == 0]
            raise ValueError(
                f"groups of {size} ranks cannot be made of {n}; a group's size divides "
                f"the number of ranks: {', '.join(fits) or 'leave groups out'}"
            )
        self.size, self.copies = size, n // size
        self.number, self.place = divmod(every.rank, size)
        first = self.number * size
        self.within, self.across = every, Group("across", ranks[self.place :: size])
        if self.copies > 1:
            self.within = Group("within", ranks[first : first + size])
