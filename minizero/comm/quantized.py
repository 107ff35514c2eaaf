"""Block-wise quantized rows: what travels is one or half a byte an element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .algorithms import ordered_sum, store
from .point_to_point import Cuts, Rows, exchange
from .scope import rank, world_size

BLOCK = 128  # elements that share a scale, which is one byte


@dataclass(frozen=True)
class Code:
    """Whole numbers of `bits`, 8 or 4, times a power of two for each block.

    The scale is the smallest power of two with which the block's largest value
    fits, so values in code are encoded to themselves: whoever sends them on
    changes no bit. The number that a symmetric code leaves over, -2^(bits-1),
    is -0.0. A block with a value that is not finite is NaN, every value of it.
    `segment`: blocks begin anew after so many elements; None: never.
    """

    bits: int
    segment: int | None = None

    @property
    def most(self) -> int:
        """The largest whole number: 127 or 7."""
        return 2 ** (self.bits - 1) - 1

    def nbytes(self, elements: int) -> int:
        """Bytes of a row in code, scales and padding included."""
        segment = self.segment or elements
        blocks = -(-segment // BLOCK) * (elements // segment if segment else 0)
        return blocks * (BLOCK * self.bits // 8 + 1)

    def encode(self, row: Tensor) -> Tensor:
        """A row, [n], as bytes."""
        x = row.float().view(-1, self.segment or max(row.numel(), 1))
        x = F.pad(x, (0, -x.shape[1] % BLOCK)).view(-1, BLOCK)
        least, power = torch.frexp(x.abs().amax(1) / self.most)
        power = (power - (least == 0.5).int()).clamp(-126, 127)
        q = torch.ldexp(x, -power[:, None]).round().clamp(-self.most, self.most)
        nothing = (x == 0) & x.signbit()
        q = torch.where(nothing, -self.most - 1, q).nan_to_num(0).to(torch.int8)
        scale = torch.where(least.isfinite(), power + 127, 255).to(torch.uint8)
        code = q.view(torch.uint8)
        if self.bits == 4:
            code = (code[:, ::2] & 15) | (code[:, 1::2] << 4)
        return torch.cat([code.flatten(), scale])

    def decode(self, code: Tensor, out: Tensor) -> Tensor:
        """The inverse, into `out`, [n]."""
        width = BLOCK * self.bits // 8
        blocks = code.numel() // (width + 1)
        packed = code[: blocks * width].view(blocks, width).view(torch.int8)
        if self.bits == 4:
            low = (packed << 4) >> 4
            packed = torch.stack([low, packed >> 4], 2).flatten(1)
        scale = code[blocks * width :].int()
        x = torch.ldexp(packed.float(), (scale - 127)[:, None])
        x = torch.where(packed == -self.most - 1, -0.0, x)
        x = torch.where(scale[:, None] == 255, torch.nan, x)
        rows = out.view(-1, self.segment or max(out.numel(), 1))
        padded = -(-rows.shape[1] // BLOCK) * BLOCK
        return rows.copy_(x.view(-1, padded)[:, : rows.shape[1]]).view(-1)

    def reduce_scatter(
        self, out: Tensor, inp: Rows, tag: int, average: bool
    ) -> Callable[[], None]:
        """Every rank sends every other its row in code, and sums what it decodes.

        So a value is rounded once, and not at each hop of a ring. The own row is not.
        """
        me, n = rank(), world_size()
        others = [j for j in range(n) if j != me]
        own = inp[me]
        came = {j: self.empty(own) for j in others}
        wait = exchange({j: self.encode(inp[j]) for j in others}, came, tag)

        def finish() -> None:
            wait()
            room = own.new_empty(own.shape, dtype=torch.float32)
            every = [
                own.float() if j == me else self.decode(came[j], room.clone())
                for j in range(n)
            ]
            store(out, ordered_sum(every, average))

        return finish

    def all_gather(
        self,
        inner: Callable[[Rows, Tensor, int], Callable[[], None]],
        out: Rows,
        inp: Tensor,
        tag: int,
    ) -> Callable[[], None]:
        """Gather codes by `inner`, and decode all, the own one too: ranks agree."""
        code, n = self.encode(inp[: out[rank()].numel()]), world_size()
        came = code.new_empty(n * code.numel())
        wait = inner(Cuts(came, n), code, tag)

        def finish() -> None:
            wait()
            for row, part in zip(out, came.view(n, -1), strict=True):
                self.decode(part, row)

        return finish

    def empty(self, row: Tensor) -> Tensor:
        """Room for a row's code."""
        return row.new_empty(self.nbytes(row.numel()), dtype=torch.uint8)


_codes: list[Code | None] = []  # the innermost `quantized` last


@contextmanager
def quantized(bits: int | None, segment: int | None = None) -> Iterator[None]:
    """What reductions and gathers inside send is in code, of 8 or 4 bits; None: not."""
    if bits not in (None, 8, 4):
        raise ValueError(f"what is sent is quantized to 8 or 4 bits, not {bits!r}")
    _codes.append(Code(bits, segment) if bits else None)
    try:
        yield
    finally:
        _codes.pop()


def current_code() -> Code | None:
    """That of the next collective; None sends values as they are."""
    return _codes[-1] if _codes else None


def weight(sent: int, row: int, dtype: torch.dtype) -> tuple[str, int]:
    """The kind of what is sent, and the bytes of so many elements in rows of `row`."""
    code = current_code()
    if code is None:
        return str(dtype).removeprefix("torch."), sent * dtype.itemsize
    return f"int{code.bits}", sent // max(row, 1) * code.nbytes(row)
