"""The arithmetic of batches: any two of three sizes give the third."""

from __future__ import annotations

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def batch_sizes(
    ranks: int, total: int | None, micro: int | None, steps: int | None
) -> tuple[int, int, int]:
    """All three, from the ones that are given: total = micro * steps * ranks.

    `total`: samples of a step; `micro`: samples of one rank in one forward;
    `steps`: micro-batches of a step. One of the first two alone means no
    accumulation. Raises ValueError if the sizes do not fit.
    """
    if total is None and micro is None:
        raise ValueError(
            f"the size of a batch is not known: give {TOTAL} or {MICRO}"
        )
    if total is not None and micro is not None and steps is not None:
        if micro * steps * ranks != total:
            raise ValueError(
                f"{TOTAL} = {total}, but {MICRO} * {STEPS} * ranks = "
                f"{micro} * {steps} * {ranks} = {micro * steps * ranks}; "
                "leave one of the three out"
            )
        return total, micro, steps
    if total is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        return micro * steps * ranks, micro, steps
    if micro is not None:
        return total, micro, _rest(total, ranks, MICRO, micro)
    if steps is None:
        return total, _share(total, ranks, f"the number of ranks, {ranks}"), 1
    return total, _rest(total, ranks, STEPS, steps), steps


def _rest(total: int, ranks: int, name: str, size: int) -> int:
    """The third size, where `name` is the second."""
    product = size * ranks
    return _share(
        total, product, f"{name} * ranks = {size} * {ranks} = {product}"
    )


def _share(total: int, parts: int, what: str) -> int:
    share, rest = divmod(total, parts)
    if rest:
        below = total - rest
        fits = f"{below} or {below + parts}" if below else f"{parts}"
        raise ValueError(
            f"{TOTAL} = {total} is no multiple of {what}; use {fits}"
        )
    return share
