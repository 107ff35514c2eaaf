"""8-bit products: torch's own as the reference, and what they save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minizero import Plan, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.precision import Float8Linear, MixedPrecision
from minizero.precision.float8 import E4M3, E5M2, product, quantize, use_float8
from minizero.ranks import Pool, rank

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=64)


@pytest.mark.parametrize(("dtype", "digits"), [(E4M3, 3), (E5M2, 2)])
def test_quantize(dtype: torch.dtype, digits: int) -> None:
    """The largest number is exact; what is not tiny is off by half a step at most."""
    torch.manual_seed(0)
    for size in (1e-30, 1.0, 1e30):
        x = torch.randn(1000) * size
        values, scale = quantize(x, dtype)
        back = values.float() * scale
        largest = x.abs().argmax()
        assert values.dtype == dtype and scale.dtype == torch.float32
        assert back[largest].item() == pytest.approx(x[largest].item(), rel=1e-6)
        big = x.abs() > x.abs().max() / 32
        assert ((back - x) / x)[big].abs().max() <= 2.0 ** -(digits + 1) * 1.0001


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_product_is_torchs(left: torch.dtype, out: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = quantize(torch.randn(48, 64), left), quantize(torch.randn(32, 64), E4M3)
    expected = torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=out
    )
    got = product(a, (b[0].t(), b[1]), out)
    # fp32 sums in another order: one rounding apart at most
    torch.testing.assert_close(got, expected, rtol=torch.finfo(out).eps, atol=1e-5)


def test_without_rows() -> None:
    layer, x = Float8Linear(16, 16), torch.empty(0, 16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad.eq(0).all()


def test_use_float8_keeps_the_parameters() -> None:
    model = GPT(CONFIG)
    before = dict(model.named_parameters())
    names = use_float8(model)
    assert len(names) == 4 * CONFIG.layers and "head" not in names  # tied
    assert all(p is before[name] for name, p in model.named_parameters())
    ups = use_float8(GPT(CONFIG), lambda name, _: name.endswith("up"))
    assert ups == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    with pytest.raises(ValueError, match="'0' maps 10 features to 32"):
        use_float8(nn.Sequential(nn.Linear(10, 32)))


def train(stage: int) -> list[float]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    use_float8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    net = parallelize(model, optimizer, Plan.stage(stage), precision=MixedPrecision())
    generator = torch.Generator().manual_seed(rank())
    x, losses = torch.randint(64, (2, 16), generator=generator), []
    for _ in range(8):
        loss = net(x, x)
        net.backward(loss)
        net.step()
        losses.append(loss.item())
    return losses


def test_stages_are_equal(two: Pool) -> None:
    """How near the losses are to bf16's, and what is saved, chapter 4 measures."""
    expected = two.run(train, 0)
    assert all(losses[-1] < 0.85 * losses[0] for losses in expected)
    for stage in (2, 3):
        assert two.run(train, stage) == expected
