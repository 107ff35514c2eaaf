"""The laboratory: the GPT, the corpus, the figures, the toy GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from minizero import estimate
from minizero.comm.ledger import Call
from minizero.lab import plots
from minizero.lab.models import gpt
from minizero.lab.models.corpus import Corpus
from minizero.lab.models.gpt import GPT, SIZES, GPTConfig
from minizero.lab.plots import narrow, style
from minizero.lab.plots.memory import COLUMNS
from minizero.lab.toygpu import ToyGPU
from minizero.memory.labels import CATEGORIES
from minizero.memory.tracker import Sample

TINY = GPTConfig(layers=2, hidden=16, heads=2, sequence=32)
UNITS = {"m": 1e6, "b": 1e9}


def tokens(batch: int = 2, sequence: int = 16) -> torch.Tensor:
    return torch.randint(256, (batch, sequence))


# --- The GPT ---


@pytest.mark.parametrize("name", SIZES)
def test_size_has_the_parameters_of_its_formula_and_of_its_name(name: str) -> None:
    config = GPTConfig.named(name)
    with torch.device("meta"):
        model = GPT(config)
    count = sum(p.numel() for p in model.parameters())
    assert count == gpt.count_parameters(config)
    assert count == pytest.approx(float(name[:-1]) * UNITS[name[-1]], rel=0.06)


def test_forward_gives_logits_or_their_cross_entropy() -> None:
    torch.manual_seed(0)
    model, x, y = GPT(TINY), tokens(), tokens()
    logits, loss = model(x), model(x, y)
    assert logits.shape == (2, 16, 256)
    picked = logits.log_softmax(-1).gather(-1, y[..., None])
    torch.testing.assert_close(loss, -picked.mean())
    assert loss.dtype == torch.float32
    # At the start the model knows nothing: log 256 nats a byte.
    assert loss.item() == pytest.approx(5.545, abs=0.3)


# --- The corpus ---


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return Corpus()


def test_standard_library_is_a_corpus(stdlib: Corpus) -> None:
    whole = len(stdlib.train) + len(stdlib.valid)
    assert whole > 5_000_000
    assert len(stdlib.train) == whole * 9 // 10
    assert stdlib.train.dtype == torch.uint8
    again = Corpus()
    assert torch.equal(stdlib.train, again.train)
    assert "standard library of Python 3" in str(stdlib)
    text = bytes(stdlib.train.numpy())
    assert b"class OrderedDict" in text
    assert b"import unittest\nfrom test import support" not in text


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_world_size_sees_the_same_global_batch(
    stdlib: Corpus, world_size: int
) -> None:
    parts = [stdlib.batch(3, rank, world_size, 8, 64) for rank in range(world_size)]
    x, y = (torch.cat(rows) for rows in zip(*parts, strict=True))
    assert x.shape == y.shape == (8, 64)
    assert x.dtype == y.dtype == torch.int64
    whole, _ = stdlib.batch(3, 0, 1, 8, 64)
    assert torch.equal(x, whole)
    assert torch.equal(x[:, 1:], y[:, :-1])


# --- The palette and the figures ---


def test_palette_covers_every_category_and_reads_on_every_page() -> None:
    for page in ("#FFFFFF", "#121212"):
        # the best that one grey can do on both is 4.3
        assert style.contrast(style.GREY, page) > 4.25
        assert all(style.contrast(line, page) > 3 for line in style.LINES)
    for fill in (*style.CATEGORY_COLOURS.values(), *style.DOING_COLOURS.values()):
        assert style.contrast(style.ink(fill), fill) > 4.5
    assert tuple(style.CATEGORY_COLOURS) == CATEGORIES
    hues = set(style.CATEGORY_COLOURS.values())
    for other in {*style.LINES, style.GREY, *style.DOING_COLOURS.values()} - hues:
        assert len({other[i : i + 2] for i in (1, 3, 5)}) == 1, "a grey"


def texts(figure: plots.Figure) -> list[str]:
    figure.draw_without_rendering()
    return [t.get_text() for t in figure.findobj(plots.mpl.text.Text) if t.get_text()]


def samples(totals: Sequence[int], marks: dict[int, str]) -> list[Sample]:
    return [
        Sample(i, marks.get(i, ""), "", {"parameters": 10, "activations": total})
        for i, total in enumerate(totals)
    ]


def call(op: str, launched: float, waited: float, finished: float) -> Call:
    times = {"launched": launched, "waited": waited, "finished": finished}
    return Call(op, 8, 8, 32, "float32", "", "", **times)


def test_memory_bars_carry_their_numbers() -> None:
    rows = {f"stage {s}": estimate(7e9, 8, s) for s in range(4)}
    figure = plots.memory_bars(rows, budget=80e9)
    shown = texts(figure)
    for text in (*rows, "112 GB", "38.5 GB", "26.25 GB", "14 GB", "84 GB", "80 GB"):
        assert text in shown
    assert "activations" not in shown  # nothing of it, so no place in the legend
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths) == pytest.approx(112e9 + 38.5e9 + 26.25e9 + 14e9)


def test_memory_bars_take_live_bytes_and_refuse_other_names() -> None:
    assert "5 kB" in texts(plots.memory_bars({"now": {"buffers": 5000}}))
    assert "0 B" in texts(plots.memory_bars({"now": {}}))
    with pytest.raises(ValueError, match="'weights' is no category"):
        plots.memory_bars({"now": {"weights": 1}})
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.memory_bars({})


def test_a_phone_gets_a_narrow_drawing() -> None:
    rows = {"data parallel, on many GPUs": {"optimizer": 60e9, "parameters": 9e9}}
    figure = plots.memory_bars(rows)
    before, size = texts(figure), figure.get_figwidth()
    _, about = narrow.png(figure)
    assert about["narrow"]["width"] == 326 < about["width"]
    assert texts(figure) == before and figure.get_figwidth() == size
    with narrow.narrow(figure):
        assert "data parallel,\non many GPUs" in texts(figure)
        hidden = [t.get_text() for t in figure.axes[0].texts if not t.get_visible()]
        assert hidden == ["9 GB"]
    numbers = style.single(2)[0]
    numbers.axes[0].set_xticks(range(24), [str(1000 + i) for i in range(24)])
    with narrow.narrow(numbers):
        shown = [t for t in numbers.axes[0].get_xticklabels() if t.get_visible()]
        assert [t.get_text() for t in shown] == [f"{n}" for n in range(1000, 1024, 4)]
    assert all(t.get_visible() for t in numbers.axes[0].get_xticklabels())


def test_memory_over_step_keeps_the_peak_and_the_marks() -> None:
    totals = [*range(2000), 70_000, *range(2000, 0, -1)]
    figure = plots.memory_over_step(samples(totals, {5: "forward", 3000: "step"}), 9e4)
    assert len(totals) > COLUMNS
    shown = texts(figure)
    for text in ("peak 70.01 kB", "forward", "step", "budget 90 kB"):
        assert text in shown
    top = max(patch.get_xy()[:, 1].max() for patch in figure.axes[0].patches)
    assert top == 70_010
    with pytest.raises(ValueError, match="no samples"):
        plots.memory_over_step([])


def test_timeline_hatches_the_wait() -> None:
    """A lane for waiting, and below it the calls; those that overlap stand apart."""
    rows = [
        [
            call("all_gather", 10.0, 10.001, 10.004),
            call("all_reduce", 10.002, 10.002, 0),
        ],
        [call("all_gather", 10.001, 10.005, 10.005)],
    ]
    figure = plots.timeline(rows)
    assert {"rank 0", "rank 1", "all_gather", "waiting"} <= set(texts(figure))
    assert "all_reduce" not in texts(figure)  # never waited for, so it has no end
    drawn = figure.axes[0].patches
    spans = sorted((round(b.get_x(), 6), round(b.get_width(), 6)) for b in drawn)
    assert spans == [(0, 4), (1, 3), (1, 4)]  # milliseconds; the second is the wait
    assert sorted(bool(bar.get_hatch()) for bar in drawn) == [False, False, True]
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.timeline([[], []])
    row = [call("all_gather", t, t, t + 2.5) for t in range(4)]
    drawn = [b for b in plots.timeline([row]).axes[0].patches if not b.get_hatch()]
    for a, b in itertools.combinations(drawn, 2):
        apart = (
            a.get_x() + a.get_width() <= b.get_x()
            or a.get_y() + a.get_height() <= b.get_y()
            or b.get_y() + b.get_height() <= a.get_y()
        )
        assert apart


def test_equal_losses_share_a_line() -> None:
    figure = plots.loss_curves(
        {"stage 0": [3.0, 2.0], "stage 3": [3.0, 2.0], "other": {1: 3.0, 10: 2.5}}
    )
    assert len(figure.axes[0].lines) == 2
    names = [text for text in texts(figure) if "stage" in text or text == "other"]
    assert names == ["other", "stage 0 = stage 3"]  # as high as the lines end
    with pytest.raises(ValueError, match="'none' has no losses"):
        plots.loss_curves({"none": []})


# --- The toy GPU ---


def test_toy_gpu_counts_freed_and_resized_storages() -> None:
    with ToyGPU(10_000) as gpu:
        flat = torch.zeros(2000)
        flat.untyped_storage().resize_(0)
        other = torch.zeros(2000)
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 8 kB"):
            flat.untyped_storage().resize_(8000)
        assert flat.untyped_storage().nbytes() == 0
        assert gpu.total == other.untyped_storage().nbytes()
        del other
        assert gpu.total == 0
        flat.untyped_storage().resize_(8000)
        assert gpu.total == 8000
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4 kB"):
            flat.untyped_storage().resize_(12_000)
        assert gpu.total == flat.untyped_storage().nbytes() == 8000


def test_state_that_is_there_before_may_not_fit() -> None:
    """And then nothing of the toy GPU is left behind."""
    model, resize = GPT(TINY), torch.UntypedStorage.resize_
    with pytest.raises(torch.OutOfMemoryError), ToyGPU(100, model):
        pass
    assert torch.UntypedStorage.resize_ is resize
    with ToyGPU(1e6):
        assert model(tokens()).shape == (2, 16, 256)
