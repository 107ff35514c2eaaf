"""The laboratory: the GPT, the corpus, the figures, the toy GPU."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from minizero import estimate
from minizero.comm.ledger import Call
from minizero.lab import plots
from minizero.lab.models import gpt
from minizero.lab.models.corpus import Corpus
from minizero.lab.models.gpt import GPT, SIZES, GPTConfig
from minizero.lab.plots import bars, style
from minizero.lab.plots.memory import COLUMNS
from minizero.lab.toygpu import ToyGPU
from minizero.memory.labels import CATEGORIES
from minizero.memory.tracker import Sample, Tracker
from minizero.ranks.launch import launch

TINY = GPTConfig(layers=2, hidden=16, heads=2, sequence=32)
UNITS = {"m": 1e6, "b": 1e9}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations are faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_unknown_size_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no model size '2m'.*0\.1m, 0\.5m.*1b\.$"):
        GPTConfig.named("2m")


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


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model, x = GPT(TINY), tokens()
    changed = x.clone()
    changed[:, 10] += 1
    changed %= 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_longer_sequence_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens.*positions for 32"):
        GPT(TINY)(tokens(sequence=33))


def test_head_is_tied_to_the_embedding() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.tokens.weight
    assert len(list(model.parameters())) == 2 + 12 * TINY.layers + 2


def test_checkpointed_blocks_give_the_same_gradients_and_keep_less() -> None:
    """Each block runs a second time through its own call, so its hooks see it."""
    x, y = tokens(), tokens()
    gradients, kept, calls = [], [], []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(2, 16, 2, sequence=32, checkpoint=checkpoint))
        count = [0]
        model.blocks[0].register_forward_pre_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        with Tracker(model) as tracker:
            loss = model(x, y)
            kept.append(tracker.live["activations"])
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        calls.append(count[0])
    assert all(map(torch.equal, *gradients))
    assert calls == [1, 2]
    assert kept[1] < kept[0] / 2


def test_generate_continues_the_prompt() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)

    def draw(seed: int, temperature: float = 1.0) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(b"def ", 40, temperature, generator)

    assert len(draw(0)) == 40  # past the model's 32 positions
    assert draw(0) == draw(0) != draw(1)
    assert draw(0, temperature=0) == draw(1, temperature=0)
    likeliest = model(torch.tensor([list(b"def ")]))[0, -1].argmax()
    assert draw(0, temperature=0)[0] == likeliest


def test_decay_groups_hold_each_trained_parameter_once() -> None:
    model = GPT(TINY)
    model.positions.weight.requires_grad_(False)
    decay, plain = gpt.decay_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in decay["params"])
    assert all(p.ndim == 1 for p in plain["params"])
    grouped = [id(p) for p in decay["params"] + plain["params"]]
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trained)


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


def test_batches_depend_on_seed_and_step(stdlib: Corpus) -> None:
    keys = [(0, 0), (1, 0), (0, 1), (2, 5)]
    batches = [stdlib.batch(step, 0, 1, 4, 32, seed=seed)[0] for seed, step in keys]
    for a, b in itertools.combinations(batches, 2):
        assert not torch.equal(a, b)
    valid, _ = stdlib.batch(0, 0, 1, 4, 32, part="valid")
    assert bytes(valid[0].tolist()) in bytes(stdlib.valid.numpy())


@pytest.mark.parametrize(
    ("batch", "world_size", "message"),
    [
        (3, 4, r"^The batch has 3 sequences for 4 ranks; .*\.$"),
        (6, 4, r"^A batch of 6 .* not divide over 4 ranks; make it 4 or 8\.$"),
    ],
)
def test_uneven_batch_is_refused(
    stdlib: Corpus, batch: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stdlib.batch(0, 0, world_size, batch, 8)


def test_folder_is_read_in_order_and_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first\xff")  # no UTF-8, but text
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    for name in "zpxqyr":
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    read = Corpus(tmp_path)
    text = bytes(torch.cat([read.train, read.valid]).numpy())
    assert text == b"first\xffsecondpqrxyz"
    assert "8 files" in str(read)


def test_paths_without_text_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("empty", "folder"):
        with pytest.raises(ValueError, match="has no text in it; give another"):
            Corpus(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Corpus(tmp_path / "nowhere")


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 20)
    read = Corpus(tmp_path / "short")
    x, _ = read.batch(0, 0, 1, 2, 17)
    assert x.shape == (2, 17)
    with pytest.raises(ValueError, match="train part .* 18 bytes, .* of 18 needs 19"):
        read.batch(0, 0, 1, 2, 18)
    with pytest.raises(ValueError, match="valid part .* 2 bytes"):
        read.batch(0, 0, 1, 2, 4, part="valid")


# --- The palette and the figures ---


def test_palette_covers_every_category_and_reads_on_every_page() -> None:
    for page in ("#FFFFFF", "#121212"):
        # the best that one grey can do on both is 4.3
        assert style.contrast(style.GREY, page) > 4.25
        assert all(style.contrast(line, page) > 2 for line in style.LINES)
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
    drawn = [b for b in plots.timeline({7: row}).axes[0].patches if not b.get_hatch()]
    for a, b in itertools.combinations(drawn, 2):
        apart = (
            a.get_x() + a.get_width() <= b.get_x()
            or a.get_y() + a.get_height() <= b.get_y()
            or b.get_y() + b.get_height() <= a.get_y()
        )
        assert apart


def test_bars_of_other_kinds() -> None:
    """Bytes read and written, libraries, and what a block saves."""
    traffic = bars.traffic_bars({"fused": (16, 12), "apart": (60, 40)}, 28, "bytes")
    assert {"28", "100", "bytes, read", "bytes, written"} <= set(texts(traffic))
    peers = bars.peer_bars({"minizero": [1.0, 3.0], "FSDP2": [5.0]}, ["FSDP2", "none"])
    assert {"FSDP2", "5"} <= set(texts(peers)) and "minizero" not in texts(peers)
    saved = plots.saved_bars({"none": {("block.up", "mm"): 900, ("", "add"): 100}})
    assert {"up", "1 kB"} <= set(texts(saved))


def test_equal_losses_share_a_line() -> None:
    figure = plots.loss_curves(
        {"stage 0": [3.0, 2.0], "stage 3": [3.0, 2.0], "other": {1: 3.0, 10: 2.5}}
    )
    assert len(figure.axes[0].lines) == 2
    names = [text for text in texts(figure) if "stage" in text or text == "other"]
    assert names == ["other", "stage 0 = stage 3"]  # as high as the lines end
    with pytest.raises(ValueError, match="'none' has no losses"):
        plots.loss_curves({"none": []})


def test_figures_are_clear_small_and_the_same_each_time() -> None:
    def render() -> bytes:
        figure = plots.memory_bars({f"{s}": estimate(7e9, 8, s) for s in range(4)})
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=192, metadata={"Software": None})
        return out.getvalue()

    first = render()
    assert first == render()
    assert len(first) < 100_000
    pixels = plots.mpl.image.imread(io.BytesIO(first))
    assert (pixels[..., 3] == 0).mean() > 0.4  # between the bars too
    assert pixels.shape[1] == int(plots.WIDTH * 192)


def test_training_needs_no_figures() -> None:
    """The model, the data and the toy GPU import neither matplotlib nor widgets."""
    code = (
        "import sys, minizero, minizero.lab.models.gpt, minizero.lab.models.corpus\n"
        "import minizero.lab.toygpu\n"
        "heavy = {'matplotlib', 'anywidget', 'ipywidgets', 'IPython'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- The toy GPU ---


def test_toy_gpu_refuses_what_does_not_fit() -> None:
    with ToyGPU(10_000) as gpu:
        kept = torch.zeros(1000)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(2000)
        assert gpu.live["activations"] == gpu.total == gpu.peak == 4000
        assert [sample.live["activations"] for sample in gpu.samples] == [4000]
        assert kept.sum() == 0
    assert str(caught.value) == (
        "Out of memory: tried to allocate 8 kB on a toy GPU of 10 kB, where 4 kB are "
        "in use (activations 4 kB); the largest part is activations."
    )


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


def test_toy_gpu_names_the_largest_category() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig.named("0.1m"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    weights = sum(p.numel() for p in model.parameters()) * 4
    with ToyGPU(weights * 5, model, optimizer) as gpu:
        model(tokens(1, 1)).sum().backward()
        optimizer.step()
        assert gpu.live["optimizer"] > 2 * weights
        with pytest.raises(
            torch.OutOfMemoryError, match=r"largest part is optimizer\."
        ):
            model(tokens(8, 128))
    assert weights * 4 < gpu.peak <= gpu.capacity


def test_state_that_is_there_before_may_not_fit() -> None:
    """And then nothing of the toy GPU is left behind."""
    model, resize = GPT(TINY), torch.UntypedStorage.resize_
    with pytest.raises(torch.OutOfMemoryError), ToyGPU(100, model):
        pass
    assert torch.UntypedStorage.resize_ is resize
    with ToyGPU(1e6):
        assert model(tokens()).shape == (2, 16, 256)


def test_toy_gpu_holds_in_a_rank() -> None:
    def run() -> str:
        with ToyGPU(1000):
            try:
                torch.zeros(1000)
            except torch.OutOfMemoryError as error:
                return str(error)
        return "it fitted"

    for said in launch(run, 2):
        assert said.startswith("Out of memory: tried to allocate 4 kB on a toy GPU of")
