"""Among which ranks a collective is: all, one group of them, or one of each group."""

from __future__ import annotations

from dataclasses import dataclass

from ..ranks.launch import rank as own_rank
from ..ranks.launch import world_size as all_ranks


@dataclass(frozen=True)
class Scope:
    """Some of the ranks, in their order; the ledger has its `name`."""

    name: str
    ranks: tuple[int, ...]


_scopes: list[Scope | None] = []  # the innermost `among` last


class among:
    """Collectives inside are among the ranks of `scope` alone; None: among all.

    Its ranks make the same calls, and other ranks others, at the same place of the
    sequence. The rows of a buffer are as many as the scope's ranks. What is launched
    inside keeps its scope until it is waited for.
    """

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    def __enter__(self) -> None:
        _scopes.append(self.scope)

    def __exit__(self, *error: object) -> None:
        _scopes.pop()


def current_scope() -> Scope | None:
    """That of the next collective; None is all ranks."""
    return _scopes[-1] if _scopes else None


def scope_name() -> str:
    """What the ledger calls it."""
    scope = current_scope()
    return "all" if scope is None else scope.name


def rank() -> int:
    """This process's place among the ranks of the scope."""
    scope, mine = current_scope(), own_rank()
    return mine if scope is None else scope.ranks.index(mine)


def world_size() -> int:
    """How many ranks are in the scope."""
    scope = current_scope()
    return all_ranks() if scope is None else len(scope.ranks)


def member(place: int) -> int:
    """Which of all ranks has that place in the scope."""
    scope = current_scope()
    return place if scope is None else scope.ranks[place]


class Groups:
    """All ranks in groups of `size`: neighbours, such as the GPUs of a node.

    A buffer of N shards is kept once a group. The rank at place j of its group keeps
    shards j·R to (j+1)·R - 1, where R, `copies`, is the number of groups. `within`: the
    own group; None: it is all ranks. `across`: the ranks that keep the same shards.

    Raises ValueError unless `size` divides the number of ranks.
    """

    def __init__(self, size: int) -> None:
        n, mine = all_ranks(), own_rank()
        if not 1 <= size <= n or n % size:
            fits = [str(g) for g in range(2, n + 1) if n % g == 0]
            raise ValueError(
                f"groups of {size} ranks cannot be made of {n}; a group's size divides "
                f"the number of ranks: {', '.join(fits) or 'leave groups out'}"
            )
        self.size, self.copies = size, n // size
        self.group, self.place = divmod(mine, size)
        first = self.group * size
        members = Scope("within", tuple(range(first, first + size)))
        self.within = members if self.copies > 1 else None
        self.across = Scope("across", tuple(range(self.place, n, size)))
        self.shard = shard_of(mine, size, n)


def shard_of(rank: int, group: int, ranks: int) -> int:
    """Which of the N shards is this rank's alone: of those its place keeps, one."""
    number, place = divmod(rank, group)
    return place * (ranks // group) + number


def rank_of(shard: int, group: int, ranks: int) -> int:
    """The inverse."""
    place, number = divmod(shard, ranks // group)
    return number * group + place
