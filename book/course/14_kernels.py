"""Chapter 14: kernels."""

import torch
from torch.nn import functional as F

from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import digest

SIZES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Floors(Exercise):
    label = "ex-kernels-1"
    answer = "floors"
    book = {"moments": 2, "itemsize": 2, "small": 2}
    starter = """
def floors(moments: int, itemsize: int, small: int) -> tuple[int, int]:
    # Bytes per parameter that the update of an optimizer with so many moments must
    # move: if every tensor has `itemsize` bytes an element; and if moments and master
    # weights are fp32, while the gradient that it reads, and a parameter that it also
    # writes, have `small` bytes.
    return 0, 0
"""
    public = """
assert floors(0, 4, 2) == (12, 12)  # SGD without momentum
"""
    reference = """
def floors(moments, itemsize, small):
    state = 1 + moments  # the weight too
    same = itemsize * (state + 1) + itemsize * state
    mixed = (4 * state + small) + (4 * state + small)
    return same, mixed
"""
    wrong = (
        Wrong(
            "reads only",
            "same = itemsize * (state + 1) + itemsize * state\n"
            "    mixed = (4 * state + small) + (4 * state + small)",
            "same = itemsize * (state + 1)\n    mixed = 4 * state + small",
            "You counted what is read: the weight and the moments are written too.",
        ),
        Wrong(
            "gradient written",
            "same = itemsize * (state + 1) + itemsize * state",
            "same = 2 * itemsize * (state + 1)",
            "You wrote the gradient back: the update only reads it.",
        ),
        Wrong(
            "no copy",
            "+ (4 * state + small)",
            "+ 4 * state",
            "You left out the parameter of few bits that is written beside the master.",
        ),
        Wrong(
            "copy read",
            "(4 * state + small) + (",
            "(4 * state + 2 * small) + (",
            "You read the parameter of few bits: its value comes from the master.",
        ),
    )

    def draw(self, rng):
        moments = rng.sample([1, 3, 4, 5, 6, 7], 3)
        return [
            {"moments": n, "itemsize": rng.choice([4, 8]), "small": rng.choice([1, 2])}
            for n in moments
        ]


class CostOfAClip(Exercise):
    label = "ex-kernels-2"
    answer = "clip"
    book = {"elements": 100_000, "itemsize": 4}
    starter = """
import torch

from minizero.lab.traffic import Traffic


def clip(grad: torch.Tensor) -> tuple[float, float]:
    # Bytes an element that `torch.nn.utils.clip_grad_norm_` moves, measured on this
    # flat gradient and rounded; and those that are left if Adam's kernel got the
    # factor as one more number.
    return 0, 0
"""
    public = """
assert len(clip(torch.ones(1000))) == 2
"""
    reference = """
import torch

from minizero.lab.traffic import Traffic


def clip(grad):
    p = torch.nn.Parameter(torch.zeros_like(grad))
    p.grad = grad
    with Traffic() as counted:
        torch.nn.utils.clip_grad_norm_([p], 1.0)
    return round(counted.moved / p.numel()), grad.itemsize
"""
    wrong = (
        Wrong(
            "read once",
            "round(counted.moved / p.numel())",
            "2 * grad.itemsize",
            "You read the gradient once: the norm reads it, and the scaling reads it "
            "again before it writes.",
        ),
        Wrong(
            "free",
            ", grad.itemsize",
            ", 0",
            "The norm must still be known before the first element is updated: that "
            "pass stays.",
        ),
        Wrong(
            "always fp32",
            "round(counted.moved / p.numel()), grad.itemsize",
            "12, 4",
            "You counted four bytes an element, whatever the gradient's dtype is.",
        ),
        Wrong(
            "only the write is saved",
            ", grad.itemsize",
            ", 2 * grad.itemsize",
            "You saved the write only: Adam reads the gradient anyway, so the second "
            "read goes too.",
        ),
    )

    def draw(self, rng):
        return [
            {"elements": rng.randint(30_000, 90_000), "itemsize": size}
            for size in rng.sample([2, 8], 2)
        ]

    @staticmethod
    def run(answer, elements, itemsize):
        return answer(torch.ones(elements, dtype=SIZES[itemsize]))


KERNEL = '''
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl


@triton.jit
def adam_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, half_ptr, n, rate, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    g = tl.load(g_ptr + offsets, mask=mask)
    m = 0.9 * tl.load(m_ptr + offsets, mask=mask) + 0.1 * g
    v = 0.999 * tl.load(v_ptr + offsets, mask=mask) + 0.001 * g * g
    old = tl.load(p_ptr + offsets, mask=mask)
    p = old - rate * m / (tl.sqrt(v) + 1e-8)
    tl.store(p_ptr + offsets, p, mask=mask)
    tl.store(m_ptr + offsets, m, mask=mask)
    tl.store(v_ptr + offsets, v, mask=mask){store}


def update(p, g, m, v, half, rate):
    """Updates p, m and v, and leaves the rounded p in `half`; all are flat."""
    n = p.numel()
    adam_kernel[(triton.cdiv(n, 256),)](p, g, m, v, half, n, rate, BLOCK=256){after}
'''


class RoundInTheKernel(Exercise):
    label = "ex-kernels-3"
    needs = ("triton",)
    answer = "update"
    points = 6
    starter = KERNEL.format(store="", after="\n    half.copy_(p)  # 6 bytes more")
    public = """
import torch

p, g, m, v = torch.rand(4, 300).unbind()
half = torch.empty(300, dtype=torch.float16)
update(p, g, m, v, half, 0.01)
assert torch.equal(half, p.half())
"""
    store = "\n    tl.store(half_ptr + offsets, p, mask=mask)"
    reference = KERNEL.format(store=store, after="")
    wrong = (
        Wrong(
            "after the kernel",
            "",
            KERNEL.format(store="", after="\n    half.copy_(p)"),
            "The copy is still an operation of its own, which reads the master again.",
        ),
        Wrong(
            "before the update",
            "half_ptr + offsets, p,",
            "half_ptr + offsets, old,",
            "You stored the parameter as it was before the update.",
        ),
        Wrong(
            "second kernel",
            "",
            KERNEL.format(
                store="",
                after="\n    rounded[(triton.cdiv(n, 256),)](p, half, n, BLOCK=256)",
            )
            + """

@triton.jit
def rounded(p_ptr, half_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + offsets, mask=offsets < n)
    tl.store(half_ptr + offsets, p, mask=offsets < n)
""",
            "A kernel of your own reads the master again, too: store the copy while "
            "the value is in a register.",
        ),
        Wrong(
            "first block only",
            "half_ptr + offsets, p, mask=mask",
            "half_ptr + offsets, p, mask=mask & (offsets < BLOCK)",
            "Only the first program stores its block.",
        ),
    )

    def draw(self, rng):
        return [{"elements": n} for n in rng.sample(range(500, 1500), 2)]

    @staticmethod
    def run(answer, elements):
        from minizero.lab.traffic import Traffic

        torch.manual_seed(elements)
        p, g, m, v = torch.rand(4, elements).unbind()
        half = torch.zeros(elements, dtype=torch.float16)
        with Traffic() as counted:
            answer(p, g, m, v, half, 0.01)
        return {
            "bytes per parameter": counted.moved / elements,
            "launches": counted.launches.total(),
            "copies by torch": counted.launches["copy_"],
            "parameter and moments": digest([p, m, v]),
            "copies that are the rounded parameter": int((half == p.to(half)).sum()),
        }


class LastBlock(Exercise):
    label = "ex-kernels-4"
    needs = ("triton",)
    answer = "centered"
    points = 6
    starter = """
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl


@triton.jit
def center(x_at, y_at, width, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = tl.program_id(0) * width + at
    x = tl.load(x_at + here, mask=inside, other=0.0)
    x = x - tl.sum(x, 0) / width
    scale = tl.sqrt(tl.sum(x * x, 0) / width)
    tl.store(y_at + here, x / scale, mask=inside)


def centered(x: torch.Tensor) -> torch.Tensor:
    "Each row of x less its mean, over its deviation."
    y = torch.empty_like(x)
    rows, width = x.shape
    center[(rows,)](x, y, width, BLOCK=triton.next_power_of_2(width))
    return y
"""
    public = """
x = torch.randn(4, 256)
wanted = torch.nn.functional.layer_norm(x, (256,))
assert torch.allclose(centered(x), wanted, atol=1e-4)
"""
    reference = starter.replace(
        "    scale =", "    x = tl.where(inside, x, 0.0)\n    scale ="
    )
    wrong = (
        Wrong(
            "as merged",
            "    x = tl.where(inside, x, 0.0)\n",
            "",
            "The lanes outside the row are 0 until the mean is subtracted from them "
            "as well; then each adds its square to the variance.",
        ),
        Wrong(
            "divides by the block",
            "    x = x - tl.sum(x, 0) / width\n"
            "    x = tl.where(inside, x, 0.0)\n"
            "    scale = tl.sqrt(tl.sum(x * x, 0) / width)",
            "    x = x - tl.sum(x, 0) / BLOCK\n"
            "    scale = tl.sqrt(tl.sum(x * x, 0) / BLOCK)",
            "You divide by the block's width: a row has `width` elements.",
        ),
        Wrong(
            "no mean",
            "    x = x - tl.sum(x, 0) / width\n    x = tl.where(inside, x, 0.0)\n",
            "",
            "You subtract no mean any more: that is right only for rows whose mean "
            "is 0.",
        ),
    )

    def draw(self, rng):
        widths = [3, rng.randint(200, 255), rng.randint(257, 400)]
        return [{"rows": rng.randint(2, 6), "width": width} for width in widths]

    @staticmethod
    def run(answer, rows, width):
        from minizero.lab.traffic import Traffic

        torch.manual_seed(width)
        x = torch.randn(rows, width) + 1 + width % 3
        with Traffic() as counted:
            y = answer(x)
        return {
            "equal to layer_norm": torch.allclose(
                y, F.layer_norm(x, (width,)), rtol=1e-3, atol=1e-3
            ),
            "means of rows": [round(each, 2) for each in y.mean(1).tolist()],
            "mean square of a row": y.square().mean().item(),
            "bytes an element": counted.moved / x.numel(),
        }


IN_PLACE = """
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl


@triton.jit
def loss_in_place(
    logits_ptr, target_ptr, loss_ptr, width, scale, BLOCK: tl.constexpr
):
    logits_ptr += tl.program_id(0) * width
    target = tl.load(target_ptr + tl.program_id(0))
    hit = tl.load(logits_ptr + target)
    most = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, mask=cols < width, other=-1e38)
        new = tl.maximum(most, x)
        total = total * tl.exp(most - new) + tl.exp(x - new)
        most = new
    top = tl.max(most, 0)
    total = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    tl.store(loss_ptr + tl.program_id(0), total - hit)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, mask=cols < width)
        share = tl.exp(x - total) - tl.where(cols == target, 1.0, 0.0)
        tl.store(logits_ptr + cols, scale * share, mask=cols < width)


def loss_and_gradients(hidden, head, targets, chunks):
    losses, scale = hidden.new_empty(len(hidden)), 1 / len(hidden)
    of_hidden, of_head = torch.zeros_like(hidden), torch.zeros_like(head)
    logits = hidden.new_empty(-(-len(hidden) // chunks), len(head))
    tensors = hidden, targets, losses, of_hidden
    pieces = (tensor.chunk(chunks) for tensor in tensors)
    for x, target, loss, of_x in zip(*pieces, strict=True):
        rows = torch.mm(x, head.T, out=logits[: len(x)])
        loss_in_place[(len(x),)](rows, target, loss, len(head), scale, BLOCK=256)
        torch.mm(rows, head, out=of_x)
        of_head.addmm_(rows.T, x)
    return losses.mean(), of_hidden, of_head
"""


class NeverWhole(Exercise):
    label = "ex-kernels-5"
    needs = ("triton",)
    answer = "loss_and_gradients"
    points = 8
    starter = """
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl
from torch.nn import functional as F


def loss_and_gradients(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, chunks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Cross-entropy of the logits hidden @ head.T, a mean over tokens, and its
    # gradients of `hidden` and of `head`, all fp32. Repair it: at no time are there
    # logits of more than one of so many chunks of tokens, and a Triton kernel of yours
    # writes their gradient over them.
    hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    loss = F.cross_entropy(hidden @ head.T, targets)
    loss.backward()
    return loss.detach(), hidden.grad, head.grad
"""
    public = """
hidden, head = torch.randn(12, 5), torch.randn(7, 5)
loss, of_hidden, of_head = loss_and_gradients(hidden, head, torch.arange(12) % 7, 4)
assert loss.ndim == 0 and of_hidden.shape == (12, 5) and of_head.shape == (7, 5)
"""
    reference = IN_PLACE
    wrong = (
        Wrong(
            "all logits",
            "logits = hidden.new_empty(-(-len(hidden) // chunks), len(head))",
            "logits = hidden.new_empty(len(hidden), len(head))",
            "You have room for all logits: one chunk's is enough, used again for the "
            "next.",
        ),
        Wrong(
            "mean of means",
            "len(head), scale, BLOCK",
            "len(head), 1 / len(x) / chunks, BLOCK",
            "You averaged the chunks' means: the last chunk has fewer tokens. Divide "
            "by all tokens.",
        ),
        Wrong(
            "sum",
            "return losses.mean()",
            "return losses.sum()",
            "You gave the sum over tokens: the loss is a mean.",
        ),
        Wrong(
            "last chunk's head",
            "of_head.addmm_(rows.T, x)",
            "torch.mm(rows.T, x, out=of_head)",
            "The head's gradient is a sum over chunks: yours has one chunk.",
        ),
        Wrong(
            "a third time",
            "    top = tl.max(most, 0)\n",
            "    top = tl.max(most, 0)\n"
            "    for start in range(0, width, BLOCK):\n"
            "        cols = start + tl.arange(0, BLOCK)\n"
            "        x = tl.load(logits_ptr + cols, mask=cols < width, other=-1e38)\n"
            "        top = tl.maximum(top, tl.max(x, 0))\n",
            "The kernel loads each logit three times: a running maximum saves one.",
        ),
    )
    explain = (
        "The logits are 2.1 GB. Two loads and one store, as in two kernels; a third of "
        "the memory of logits, log-softmax and gradient."
    )

    def draw(self, rng):
        return [
            {
                "tokens": chunks * rng.randint(6, 9) - rng.randint(1, 3),
                "width": rng.randint(5, 9),
                "vocabulary": rng.randint(500, 700),
                "chunks": chunks,
            }
            for chunks in rng.sample([8, 12, 16], 2)
        ]

    @staticmethod
    def run(answer, tokens, width, vocabulary, chunks):
        from minizero import Tracker
        from minizero.lab.traffic import Traffic

        torch.manual_seed(tokens)
        hidden, head = torch.randn(tokens, width), torch.randn(vocabulary, width)
        targets = torch.randint(vocabulary, (tokens,))
        with Tracker() as seen:
            answer(hidden, head, targets, chunks)
        with Traffic() as counted:
            loss, of_hidden, of_head = answer(hidden, head, targets, chunks)
        x, w = hidden.double().requires_grad_(), head.double().requires_grad_()
        F.cross_entropy(x @ w.T, targets).backward()
        chunk = 4 * vocabulary * -(-tokens // chunks)
        gradients = 4 * (3 * vocabulary + 2 * tokens) * width
        of_head = of_head.double()
        return {
            "loss": loss.item(),
            "gradient of hidden": torch.allclose(of_hidden.double(), x.grad, atol=1e-5),
            "gradient of head": torch.allclose(of_head, w.grad, atol=1e-5),
            "too many logits at once": seen.peak > gradients + 2 * chunk,
            "loads by kernels": round(counted.loaded / (4 * tokens * vocabulary)),
        }
