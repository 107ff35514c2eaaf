"""Seconds that a GPU computes for a block: products, attention, memory."""

from __future__ import annotations

from dataclasses import dataclass

from .machines import STREAM, Machine
from .shapes import Shape


@dataclass(frozen=True)
class Costs:
    """What a GPU does for `tokens` tokens, in sequences of `sequence`.

    A product costs its FLOP at the rate that large ones reach, and the bytes of its three
    matrices at the memory's rate: a small one cannot hide them.
    `attention`: "flash", or "eager", which writes every score.
    `precision`: "bf16", "fp16", "fp32" (products in TF32, half as fast), or "fp8" for
    the blocks' products.
    """

    shape: Shape
    machine: Machine
    tokens: int
    sequence: int
    attention: str = "flash"
    precision: str = "bf16"

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "fp32" else 2

    def memory(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return nbytes / (STREAM * self.machine.hbm)

    def product(self, m: int, n: int, k: int, faster: float = 1.0) -> float:
        """Seconds of [m, k] times [k, n]."""
        flops = 2.0 * m * n * k / (self.machine.matmul * self.machine.peak)
        moved = self.itemsize * (m * n + m * k + n * k)
        return flops * self.itemsize / 2 / faster + self.memory(moved)

    def linear(self, i: int, o: int, faster: float = 1.0) -> tuple[float, float]:
        """Forward and backward of a linear layer: one product, and two."""
        t = self.tokens
        forward = self.product(t, o, i, faster)
        return forward, self.product(t, i, o, faster) + self.product(i, o, t, faster)

    def scores(self) -> tuple[float, float]:
        """Forward and backward of attention between its projections.

        Flash computes the causal half of the scores, and again in backward: five
        products for the forward's two. Its forward is 73/63 as efficient (Dao 2023).
        """
        shape, machine, s = self.shape, self.machine, self.sequence
        if self.attention == "eager":
            flops = 4.0 * self.tokens * s * shape.hidden
            rate = machine.matmul * machine.peak
            moved = 2.0 * self.tokens * s * shape.heads  # of each pass over them
            forward = flops / rate + self.memory(7 * moved)
            return forward, 2 * flops / rate + self.memory(10 * moved)
        # on the diagonal a tile of 128 keys is computed whole
        flops = 2.0 * self.tokens * (s + 128) * shape.hidden
        rate = machine.attention * machine.peak
        return flops / (rate * 73 / 63), 2.5 * flops / rate

    def passes(self) -> tuple[float, float]:
        """Forward and backward of all that only reads and writes: bytes."""
        shape, h, f = self.shape, self.shape.hidden, self.shape.ffn
        around = 2 * h + 2 * shape.kv  # queries, keys, values and the result
        # norms 2 and 3 passes, residuals 3 and 3, copies of what attention takes
        forward, backward = 2 * (2 + 3) * h + 2 * around, 2 * (3 + 3) * h + 2 * around
        if shape.gated:  # silu, times; positions turned in fp32
            turned = 10 * (h + shape.kv)
            forward, backward = forward + 5 * f + turned, backward + 8 * f + turned
        else:  # gelu; gradients of biases are sums over tokens
            biases = sum(o for _, o in shape.products)
            forward, backward = forward + 2 * f, backward + 3 * f + biases
        if self.precision == "fp8":  # each input and gradient cast, and transposed
            forward += 2 * sum(i for i, _ in shape.products)
            backward += 2 * sum(o for _, o in shape.products)
        size = float(self.itemsize * self.tokens)
        return size * forward, size * backward

    def block(self, checkpointing: str) -> tuple[float, float]:
        """Forward and backward of one block, with what is computed again.

        "full" keeps the block's input; recomputation stops at the last tensor
        that was saved, so the last product is not repeated. "matmuls" keeps the
        products' results and the attention's; "selective" those of the attention
        and of every other linear layer, as torchtitan does (Liang et al. 2024).
        """
        faster = self.machine.fp8 if self.precision == "fp8" else 1.0
        pairs = [self.linear(i, o, faster) for i, o in self.shape.products]
        forward, backward = (sum(side) for side in zip(*pairs, strict=True))
        scores, scores_back = self.scores()
        passes, passes_back = map(self.memory, self.passes())
        again = 0.0
        if checkpointing in ("matmuls", "selective"):
            again = passes + scores * (self.attention == "eager")
        if checkpointing == "selective":
            again += sum(
                self.linear(i, o, faster)[0] for i, o in self.shape.linears[1:-1:2]
            )
        elif checkpointing == "full":
            again = forward - pairs[-1][0] + scores + passes
        forward += scores + passes
        return forward, backward + scores_back + passes_back + again

    def head(self) -> tuple[float, float]:
        """Forward and backward of the head, and a cross-entropy in fp32."""
        h, vocab = self.shape.hidden, self.shape.vocab
        forward, backward = self.linear(h, vocab)
        logits = float(self.tokens * vocab)
        # cast (2 + 4), log-softmax (4 + 4); its backward (4 + 12), cast (4 + 2)
        return forward + self.memory(14 * logits), backward + self.memory(22 * logits)
