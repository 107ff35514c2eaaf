"""Kernels against torch and against plain arithmetic, and what they move and refuse.

Without a GPU Triton interprets them. Tolerances: an element is computed in fp32 from
what was stored, and rounded once. A sum over n elements is off by about sqrt(n)
roundings of fp32, so 2e-5 of the largest term serves for a few thousand. Storing in
fp16 adds half a spacing, 2**-11 of the value; in bf16 a whole one, 2**-7, because the
interpreter cuts off what a GPU rounds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from minizero import kernels
from minizero.kernels import FusedAdam, launched
from minizero.kernels.launching import DTYPES
from minizero.lab.ptx import Compiled, ptx

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORED = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SUMMED = 2e-5

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 10**6)
few = settings(deadline=None, derandomize=True, max_examples=12)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(found: Tensor, exact: Tensor, terms: float = 1.0) -> bool:
    """Equal within the rounding of what is stored, and of fp32 in sums of `terms`."""
    bound = STORED[found.dtype] * exact.abs() + SUMMED * terms
    return bool(((found.double() - exact).abs() <= bound).all())


def three_steps(
    make: Any, n: int, dtype: torch.dtype, seed: int, **options: Any
) -> list[Tensor]:
    """A parameter and its moments after each of three steps."""
    p = nn.Parameter(drawn(seed, n, dtype=dtype))
    optimizer, seen = make([p], lr=0.1, **options), []
    for step in range(3):
        p.grad = drawn(seed + step + 1, n, dtype=dtype)
        optimizer.step()
        state = optimizer.state[p]
        seen += [t.clone() for t in (p.detach(), state["exp_avg"], state["exp_avg_sq"])]
    return seen


@given(st.integers(1, 5000), seeds, st.booleans(), st.floats(0, 1))
@few
def test_adam_is_torchs(n: int, seed: int, decoupled: bool, decay: float) -> None:
    """The other orders of torch's arithmetic move an element by a few roundings.

    Where the second moment is all but zero, a rounding of the first is a large part
    of the update; so the bound is relative to the learning rate, 0.1.
    """
    run = partial(three_steps, n=n, dtype=torch.float32, seed=seed)
    torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
    wanted = run(torchs, weight_decay=decay)
    for found in (
        run(FusedAdam, weight_decay=decay, adam_w_mode=decoupled),
        run(partial(torchs, fused=True), weight_decay=decay),
    ):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


sizes = given(st.integers(0, 5), st.integers(1, 3000), dtypes, seeds)


@sizes
@few
def test_norms(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Forward and backward, against torch's in double precision."""
    x, dy = (drawn(seed + i, rows, width, dtype=dtype) for i in range(2))
    weight, bias = (drawn(seed + i, width, dtype=dtype) for i in range(2, 4))
    for name, inputs in (
        ("layer_norm", (x, weight, bias)),
        ("layer_norm", (x, weight)),
        ("rms_norm", (x, weight)),
    ):
        ours = [t.clone().requires_grad_() for t in inputs]
        exact = [t.double().requires_grad_() for t in inputs]
        y = getattr(kernels, name)(*ours, eps=1e-3)
        z = getattr(F, name)(exact[0], (width,), *exact[1:], eps=1e-3)
        assert y.dtype == dtype and y.shape == x.shape
        grads = torch.autograd.grad(y, ours, dy)
        wanted = torch.autograd.grad(z, exact, dy.double())
        for found, right in zip((y, *grads), (z, *wanted), strict=True):
            largest = float(right.detach().abs().max()) if right.numel() else 0
            assert close(found, right, 1 + largest)


def test_a_norm_of_many_rows() -> None:
    """More rows than programs of the backward: each sums several."""
    x, weight, dy = drawn(0, 3, 100, 9), drawn(1, 9), drawn(2, 3, 100, 9)
    found, exact = [], []
    for sums, f, to in ((found, kernels, Tensor.float), (exact, F, Tensor.double)):
        inputs = [to(t).requires_grad_() for t in (x, weight)]
        shape = () if f is kernels else ((9,),)
        y = f.rms_norm(inputs[0], *shape, inputs[1], eps=1e-6)
        up = to(dy).requires_grad_()
        sums += torch.autograd.grad(y, inputs, up, create_graph=True)
    pairs = zip(found, exact, strict=True)
    assert all(close(a.detach(), b.detach(), 300) for a, b in pairs)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # not in silence
        found[0].sum().backward()


@given(st.integers(0, 4), st.integers(1, 9000) | st.integers(4097, 9000), dtypes, seeds)
@few
def test_cross_entropy(
    rows: int, vocabulary: int, dtype: torch.dtype, seed: int
) -> None:
    logits = (5 * drawn(seed, rows, vocabulary)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(-1, vocabulary, (rows,), generator=generator).to(DEVICE)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = kernels.cross_entropy(ours, target, ignore_index=-1)
    wanted = F.cross_entropy(exact, target, ignore_index=-1)
    if (target >= 0).any():
        assert close(loss, wanted, 30)
    else:
        assert loss.isnan() and wanted.isnan()
        return
    (grad,), (right,) = (
        torch.autograd.grad(x, y) for x, y in ((loss, ours), (wanted, exact))
    )
    assert grad.dtype == dtype and close(grad, right)


def test_cross_entropy_of_infinities() -> None:
    """Masked words, as a model without them would have; and a target outside."""
    x = drawn(0, 3, 9000)
    x[0, :5000] = -torch.inf
    x[1, 4999:] = -torch.inf
    target = torch.tensor([6000, 2, 8999], device=DEVICE)
    loss = kernels.cross_entropy(x, target)
    assert close(loss, F.cross_entropy(x.double(), target), 30)
    one = kernels.cross_entropy(x[1], target[1])
    assert close(one, F.cross_entropy(x[1].double(), target[1]), 30)
    target[0] = 9000
    assert kernels.cross_entropy(x, target).isnan()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_what_no_kernel_takes_is_torchs() -> None:
    """Other dtypes or modes, rows that are too wide, what is not contiguous."""
    before = Counter(launched)
    double, wide = zeros(2, 3, dtype=torch.float64), zeros(1, 20_000)
    kernels.layer_norm(double, zeros(3, dtype=torch.float64))
    kernels.rms_norm(wide, zeros(20_000))
    kernels.cross_entropy(double, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    for x, up in (double, False), (zeros(3, 2).t(), False), (zeros(2, 3), True):
        p = nn.Parameter(x.clone())
        p.grad = torch.ones_like(p)
        FusedAdam([{"params": [p], "maximize": up}], lr=0.5).step()
        assert torch.allclose(p, torch.full_like(p, 0.5 if up else -0.5))
    assert launched == before
    with pytest.raises(RuntimeError):
        kernels.layer_norm(zeros(2, 3), zeros(3), zeros(2))
    with pytest.raises(ValueError, match=r"\[3, 2\] do not fit .* \[2, 3, 5\]"):
        kernels.cross_entropy(zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))


# pointers to what is stored and to fp32, whole numbers, fp32 numbers, constants
KERNELS: list[tuple[str, str, str, str, str, dict[str, Any]]] = [
    ("adam_step", "p_ptr grad_ptr m_ptr v_ptr", "", "n",
     "beta1 rest1 beta2 rest2 rate root eps decay",
     {"DECOUPLED": True, "BLOCK": 1024}),
    *(("norm_forward", "x_ptr weight_ptr y_ptr", "mean_ptr rstd_ptr", "width", "eps",
       {"CENTER": mean, "BLOCK": 1024, "bias_ptr": None}) for mean in (True, False)),
    *(("norm_backward", "x_ptr weight_ptr dy_ptr dx_ptr",
       "mean_ptr rstd_ptr dweight_ptr", "rows width", "",
       {"CENTER": mean, "BLOCK": 1024, "dbias_ptr": None}) for mean in (True, False)),
    ("loss_forward", "logits_ptr", "total_ptr loss_ptr", "vocabulary ignored", "",
     {"BLOCK": 4096}),
    ("loss_backward", "logits_ptr dlogits_ptr", "total_ptr dloss_ptr",
     "vocabulary ignored", "", {"BLOCK": 4096}),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_kernels_compile_for_a_gpu(kind: str) -> None:
    """16 bytes an access, and no product fused into a sum in Adam."""
    every = []
    for name, stored, wide, whole, numbers, constants in KERNELS:
        types = {"target_ptr": "*i64"} if "loss" in name else {}
        columns = (stored, f"*{kind}"), (wide, "*fp32"), (whole, "i32")
        for names, written in (*columns, (numbers, "fp32")):
            types |= dict.fromkeys(names.split(), written)
        options = {"enable_fp_fusion": False} if name == "adam_step" else {}
        module = "minizero.kernels.triton_kernels"
        every.append(Compiled(module, name, types, constants, options))
    adam, *others = ptx(*every)
    each = 1024 * (4 if kind == "fp32" else 2) // (128 * 16)  # by 128 threads
    assert adam.count("ld.global.v4.b32") == 4 * each
    assert adam.count("st.global.v4.b32") == 3 * each
    assert "fma" not in adam
    assert all("global.v4.b32" in kernel for kernel in others)
