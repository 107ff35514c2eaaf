"""Collectives: values, dtypes, uneven sizes, what the ledger counts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from minizero import comm
from minizero.comm import backend, offers, point_to_point
from minizero.comm.algorithms import ordered_sum
from minizero.memory import Tracker
from minizero.ranks import cross_memory
from minizero.ranks.launch import Pool, RankError, rank, world_size

NUMBERS = [0, 1, 7, 12]


FORBIDDEN = "this system does not let a process read another's memory"


@pytest.fixture(scope="module", params=["1", "2", "3", "3 that read"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Ranks; the last ones read every message where it is."""
    with Pool(int(request.param[0])) as pool:
        if "read" in request.param and not all(pool.run(read_from, 0)):
            pytest.skip(FORBIDDEN)
        yield pool


def read_from(size: int) -> bool:
    """From now on messages of more than `size` bytes are read where they are."""
    offers.LARGE = size
    return cross_memory.readable()


def values(n: int, r: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * r + n)
    return torch.randint(-8, 8, (n,), generator=generator).to(dtype)


def collectives(
    algorithm: str, dtype: torch.dtype, staged: bool, async_op: bool
) -> None:
    """Compare with plain sums and concatenations; whole numbers, so all are exact."""
    me, ranks = rank(), world_size()
    if staged:
        stage(lambda like: True)
    try:
        with comm.algorithm(algorithm):
            for n in NUMBERS:
                parts = [values(n, r, dtype) for r in range(ranks)]
                total = torch.stack(parts).sum(0).to(dtype)
                size = -(-n // ranks)
                padded = torch.zeros(size * ranks, dtype=dtype)
                padded[:n] = total
                t = parts[me].clone()
                comm.all_reduce(t, async_op=async_op).wait()
                assert torch.equal(t, total)
                row = torch.full((size,), 9, dtype=torch.float32).to(dtype)
                comm.reduce_scatter(row, parts[me], async_op=async_op).wait()
                assert torch.equal(row, padded[me * size : (me + 1) * size])
                whole = torch.zeros(n, dtype=dtype)
                comm.all_gather(whole, row, async_op=async_op).wait()
                assert torch.equal(whole, total)
                for src in range(ranks):
                    t = parts[me].clone()
                    comm.broadcast(t, src, async_op=async_op).wait()
                    assert torch.equal(t, parts[src])
            comm.barrier()
    finally:
        stage(original_staged)


original_staged = point_to_point.staged


def stage(staged: Callable[[Tensor], bool]) -> None:
    point_to_point.staged = backend.staged = staged


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_values(pool: Pool, algorithm: str, async_op: bool) -> None:
    pool.run(collectives, algorithm, torch.float32, False, async_op)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_dtypes(pool: Pool, dtype: torch.dtype) -> None:
    if dtype == torch.uint8:
        pool.run(small_bytes)
    else:
        pool.run(collectives, "direct", dtype, False, False)


def small_bytes() -> None:
    t = torch.arange(5, dtype=torch.uint8)
    comm.all_reduce(t)
    assert torch.equal(t, torch.arange(5, dtype=torch.uint8) * world_size())


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_through_host_memory(pool: Pool, algorithm: str) -> None:
    pool.run(collectives, algorithm, torch.float32, True, False)


def in_place() -> None:
    me, ranks = rank(), world_size()
    buffer = torch.full((4 * ranks,), float(me + 1))
    own = buffer[4 * me : 4 * me + 4]
    comm.reduce_scatter(own, buffer)
    assert own.eq(ranks * (ranks + 1) / 2).all()
    comm.all_gather(buffer, own)
    assert buffer.eq(ranks * (ranks + 1) / 2).all()


def test_own_row_in_place(pool: Pool) -> None:
    pool.run(in_place)


def order_of_sums() -> tuple[bool, bool]:
    """Whether the sum depends on how the buffer is cut: direct, ring."""
    big = torch.tensor([1e8, 1.0, -1e8, 1.0])[: world_size()]
    mine = big[rank()].repeat(12)
    equal = []
    for algorithm in ("direct", "ring"):
        with comm.algorithm(algorithm):
            whole, cut = mine.clone(), mine.clone()
            comm.all_reduce(whole)
            for piece in cut.split(4):
                comm.all_reduce(piece)
        equal.append(torch.equal(whole, cut) and bool((whole == whole[0]).all()))
    return equal[0], equal[1]


def test_direct_sums_in_rank_order(pool: Pool) -> None:
    results = pool.run(order_of_sums)
    assert all(direct for direct, _ in results)
    if len(results) == 3:
        assert not any(ring for _, ring in results)


def narrow() -> torch.Tensor:
    """bf16: 1 + 1/256 + 1/256 is 1 when rounded twice, more when rounded once."""
    t = torch.tensor([1.0 if rank() == 0 else 1 / 256], dtype=torch.bfloat16)
    comm.all_reduce(t)
    return t


def test_16_bit_sums_are_rounded_once(pool: Pool) -> None:
    results = pool.run(narrow)
    if len(results) == 3:
        assert all(t.item() == 1 + 1 / 128 for t in results)


def algorithms() -> list[str]:
    """For a tensor of the host, and for one that another backend moves."""
    moved = {"cpu": "gloo", "meta": "nccl"}
    with patch.object(point_to_point, "_backends", lambda config: moved):
        return [
            backend.current_algorithm(torch.empty(1, device=device)) for device in moved
        ]


def test_the_device_of_a_tensor_chooses_the_algorithm(pool: Pool) -> None:
    results = pool.run(algorithms)
    if len(results) > 1:
        assert all(found == ["direct", "backend"] for found in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_made_where_it_is_wanted(dtype: torch.dtype) -> None:
    """But one of 16 bits in fp32, to be rounded once."""
    parts, out = list(torch.ones(5, 3, dtype=dtype)), torch.empty(3, dtype=dtype)
    total = ordered_sum(parts, True, out)
    assert total.eq(1).all() and (total is out) is (dtype is torch.float32)


def averaged(algorithm: str) -> None:
    """Of fp16 whose sum would be infinite; of fp32 as the sum is, divided."""
    me, n = rank(), world_size()
    with comm.algorithm(algorithm):
        large = torch.full((5,), 60000.0, dtype=torch.float16)
        row = large.new_zeros(-(-5 // n))
        comm.reduce_scatter(row, large, average=True)
        assert row[: max(0, min(len(row), 5 - me * len(row)))].eq(large[0]).all()
        comm.all_reduce(large, average=True)
        assert large.eq(60000.0).all()
    t = values(12, me, torch.float32) / 3
    mean = t.clone()
    comm.all_reduce(t)
    comm.all_reduce(mean, average=True)
    assert torch.equal(mean, t / n)


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_means_fit_where_sums_do_not(pool: Pool, algorithm: str) -> None:
    pool.run(averaged, algorithm)


def staged_once() -> int:
    """How often a row that goes to all peers is copied to the host."""
    stage(lambda like: True)
    cpu, copies = Tensor.cpu, []
    Tensor.cpu = lambda t: copies.append(t) or cpu(t)  # type: ignore[method-assign]
    try:
        whole = torch.zeros(3 * world_size())
        comm.all_gather(whole, torch.full((3,), rank() + 1.0))
    finally:
        Tensor.cpu = cpu  # type: ignore[method-assign]
        stage(original_staged)
    assert whole.tolist() == [r + 1.0 for r in range(world_size()) for _ in range(3)]
    return len(copies)


def test_a_row_is_staged_once(pool: Pool) -> None:
    ranks = len(copies := pool.run(staged_once))
    assert copies == [min(1, ranks - 1)] * ranks


def counted(algorithm: str) -> list[tuple[str, int, int, int, str, str]]:
    ranks = world_size()
    t, row = torch.zeros(6 * ranks), torch.zeros(6)
    with comm.algorithm(algorithm), comm.ledger() as calls:
        with comm.phase("forward", "unit"):
            comm.all_gather(t, row)
        with comm.phase("backward"):
            work = comm.reduce_scatter(row, t, async_op=True)
            assert calls[-1].finished == 0
            work.wait()
            work.wait()
        comm.all_reduce(t)
        comm.broadcast(t)
    comm.all_reduce(t)  # after the ledger has been closed
    for call in calls:
        assert call.launched <= call.waited <= call.finished
    assert calls.sent() == sum(c.sent for c in calls)
    assert "all_gather" in calls.table()
    return [(c.op, c.elements, c.sent, c.bytes, c.phase, c.unit) for c in calls]


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_ledger(pool: Pool, algorithm: str) -> None:
    results = pool.run(counted, algorithm)
    n = len(results)
    for r, seen in enumerate(results):
        share = 6 * (n - 1)
        cast = 6 * n * (n - 1) if r == 0 else 0
        assert seen == [
            ("all_gather", 6 * n, share, 4 * share, "forward", "unit"),
            ("reduce_scatter", 6 * n, share, 4 * share, "backward", ""),
            ("all_reduce", 6 * n, 2 * share, 8 * share, "", ""),
            ("broadcast", 6 * n, cast, 4 * cast, "", ""),
        ]


def callbacks() -> list[str]:
    order: list[str] = []
    work = comm.all_reduce(torch.zeros(2), async_op=True)
    work.then(lambda: order.append("first"))
    assert order == []
    work.wait()
    work.then(lambda: order.append("late"))
    work.wait()
    return order


def test_callbacks_run_once_and_never_get_lost(pool: Pool) -> None:
    for order in pool.run(callbacks):
        assert order == ["first", "late"]


def nested() -> tuple[int, int]:
    with comm.ledger() as outer, comm.ledger() as inner:
        comm.barrier()
    with comm.ledger() as other:
        pass
    assert other == [] and len(outer) == len(inner) == 1
    return len(outer), len(inner)


def goes_on() -> float:
    """The next collective: the sum of what rank 0 sends."""
    found = torch.full((5,), 1.0 + rank())
    comm.broadcast(found)
    return found.sum().item()


def forget() -> float:
    """Collectives are dropped before rank 0 has sent anything."""
    lost = torch.empty(1000)
    if rank() == 0:
        time.sleep(0.3)
    comm.broadcast(lost, async_op=True)
    comm.reduce_scatter(torch.empty(-(-1000 // world_size())), lost, async_op=True)
    del lost
    gc.collect()
    return goes_on()


def test_a_collective_that_nobody_waits_for_stops_no_other(pool: Pool) -> None:
    assert set(pool.run(forget)) == {5.0}


def dropped_by_some() -> float:
    """Rank 0 drops later than the others, and waits for another in between."""
    row, buffer = torch.empty(1000), torch.ones(1000 * world_size())
    held = comm.reduce_scatter(row, buffer, async_op=True)
    if rank() > 0:
        del held
        gc.collect()
    return goes_on()


def test_ranks_may_drop_a_collective_at_different_times(pool: Pool) -> None:
    assert set(pool.run(dropped_by_some)) == {5.0}


def reads() -> tuple[int, int]:
    """Bytes that this rank reads in an all-reduce, and its most bytes of buffers."""
    tensor = torch.full((1_000_000,), 1.0 + rank())
    real = cross_memory.Desk.read
    spy = patch.object(cross_memory.Desk, "read", autospec=True, side_effect=real)
    with spy as read, Tracker() as tracker:
        comm.all_reduce(tensor)
    assert tensor.eq(sum(range(1, world_size() + 1))).all()
    made = sum(call.args[3].nbytes for call in read.call_args_list)
    return made, tracker.peak - tensor.nbytes


def test_a_large_message_is_read_where_it_is() -> None:
    """Also it needs no buffer to land in, but a piece that fits into the cache."""
    with Pool(2) as pool:
        if not all(pool.run(read_from, 1 << 18)):
            pytest.skip(FORBIDDEN)
        for read, room in pool.run(reads):
            assert read == 4_000_000
            assert room < 2_000_000
        pool.run(cross_memory.meet, 60)
        for read, room in pool.run(unread):
            assert read == 0
            assert room >= 2_000_000


def unread() -> tuple[int, int]:
    """As on a system that forbids it."""
    cross_memory._met = None
    return reads()


def offers_of_one_tag() -> list[str]:
    """Rank 0 offers what rank 1 is to find; what rank 1 has seen."""
    desk, seen = cross_memory.desk(), []
    if rank() == 0:
        made = [desk.offer(1, 5, start) for start in (70, 60)]
        with pytest.raises(RuntimeError, match="not been waited for"):
            for _ in range(cross_memory.NEAR):
                made.append(desk.offer(1, 5, 50))
        for offer in made:
            desk.until_taken(1, offer)
        # one that is met half written, and is whole only later
        half, place = cross_memory._ENTRY, 9
        half.pack_into(desk._offered, cross_memory._at(half, 1, place), 1, place, 40, 0)
        time.sleep(0.2)
        check = 1 ^ place ^ 30
        half.pack_into(
            desk._offered, cross_memory._at(half, 1, place), 1, place, 30, check
        )
        comm.barrier()
        return seen
    for tag in (5,) * cross_memory.NEAR + (9,):
        offer = desk.find(0, tag)
        desk.take(0, offer)
        seen.append(str(offer.start))
    comm.barrier()
    desk._timeout = 0.1
    with pytest.raises(RuntimeError, match="Timed out"):
        desk.find(0, 5)
    return seen


def test_offers_are_found_in_their_order_and_whole() -> None:
    with Pool(2) as pool:
        if not all(pool.run(cross_memory.readable)):
            pytest.skip(FORBIDDEN)
        _, seen = pool.run(offers_of_one_tag)
    assert seen == ["70", "60", *["50"] * (cross_memory.NEAR - 2), "30"]


def test_ledgers_nest(pool: Pool) -> None:
    assert set(pool.run(nested)) == {(1, 1)}


def columns(algorithm: str) -> None:
    """Rows that are columns of a table, as a bucket of every shard is."""
    me, ranks = rank(), world_size()
    with comm.algorithm(algorithm):
        tables = [
            values(10 * ranks, r, torch.float32).view(-1, 10) for r in range(ranks)
        ]
        mine, total = tables[me].clone(), sum(tables)
        row = torch.empty(4)
        comm.reduce_scatter(row, mine[:, 3:7])
        assert torch.equal(row, total[me, 3:7])
        comm.all_reduce(mine[:, 3:7])
        expected = tables[me].clone()
        expected[:, 3:7] = total[:, 3:7]
        assert torch.equal(mine, expected)
        comm.all_gather(mine[:, :2], torch.full((2,), float(me)))
        assert mine[:, :2].tolist() == [[float(j)] * 2 for j in range(ranks)]
        assert torch.equal(mine[:, 2:], expected[:, 2:])


@pytest.mark.parametrize("algorithm", ["direct", "ring", "backend"])
def test_columns_of_a_table_are_rows(pool: Pool, algorithm: str) -> None:
    pool.run(columns, algorithm)


def misuse() -> list[str]:
    messages = []
    for wrong in (
        lambda: comm.reduce_scatter(torch.zeros(99), torch.zeros(4)),
        lambda: comm.all_gather(torch.zeros(4), torch.zeros(99)),
        lambda: comm.broadcast(torch.zeros(4), src=9),
        lambda: comm.all_reduce(torch.zeros(4, 4).t()),
        lambda: comm.algorithm("telepathy").__enter__(),
        lambda: comm.all_reduce([torch.zeros(1)] * 9),
    ):
        with pytest.raises(ValueError) as error:
            wrong()
        messages.append(str(error.value))
    return messages


def test_misuse_is_told(pool: Pool) -> None:
    words = ["make them equal", "make them equal", "no rank 9", ".contiguous()"]
    words += ["not 'telepathy'", "9 rows were given"]
    for message, word in zip(pool.run(misuse)[0], words, strict=True):
        assert word in message


def different(unit: str) -> None:
    t = torch.zeros(8)
    if unit:
        with comm.phase(unit=f"{unit} {rank()}"):
            comm.all_reduce(t)
    elif rank() == 0:
        comm.all_reduce(t)
    else:
        comm.broadcast(t)


@pytest.mark.parametrize("unit", ["", "unit"])
def test_ranks_that_differ_are_told_apart(unit: str) -> None:
    """By the call, or only by the unit that it is for: its data would be wrong."""
    with Pool(2, timeout=30) as pool, pytest.raises(RankError) as error:
        pool.run(different, unit)
    first, other = ("all_reduce", "broadcast") if not unit else ("unit 0", "unit 1")
    assert first in str(error.value) and other in str(error.value)
    assert "8 float32" in str(error.value)
