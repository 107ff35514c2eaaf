"""Collectives: values, dtypes, uneven sizes, groups, what the ledger counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from nasty import on_cpu_only, on_each_rank, on_two_ranks
from torch import Tensor

from minizero import comm
from minizero.comm import algorithms, transport
from minizero.ranks import Pool, rank, world_size

RANKS = (1, 2, 3)
each_algorithm = pytest.mark.parametrize("algorithm", comm.ALGORITHMS)


def values(n: int, r: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * r + n)
    return torch.randint(-8, 8, (n,), generator=generator).to(dtype)


@contextmanager
def through_the_host() -> Iterator[None]:
    """As for tensors of a GPU that gloo moves."""
    with patch.object(transport, "is_staged", lambda like: True):
        yield


def collectives(algorithm: str, dtype: torch.dtype) -> None:
    """Compare with plain sums and concatenations; whole numbers, so all are exact."""
    me, ranks = rank(), world_size()
    for n in (0, 1, 7, 12):
        how = {"async_op": n % 2 == 1}
        parts = [values(n, r, dtype) for r in range(ranks)]
        total = torch.stack(parts).sum(0).to(dtype)
        size = -(-n // ranks)
        padded = torch.zeros(size * ranks, dtype=dtype)
        padded[:n] = total
        t, row = parts[me].clone(), torch.full((size,), 9).to(dtype)
        full = torch.zeros(n, dtype=dtype)
        pieces = patch.object(algorithms, "CACHED", 4)
        with comm.algorithm(algorithm), pieces:
            comm.all_reduce(t, **how).wait()
            comm.reduce_scatter(row, parts[me], **how).wait()
            comm.all_gather(full, row, **how).wait()
            for src in range(ranks):
                sent = parts[me].clone()
                comm.broadcast(sent, src, **how).wait()
                assert torch.equal(sent, parts[src])
            comm.barrier()
        assert torch.equal(t, total) and torch.equal(full, total)
        assert torch.equal(row, padded[me * size : (me + 1) * size])


def collectives_through_the_host(algorithm: str, dtype: torch.dtype) -> None:
    with through_the_host():
        collectives(algorithm, dtype)


@each_algorithm
def test_values(pool: Pool, algorithm: str) -> None:
    pool.run(collectives, algorithm, torch.float32)
    pool.run(collectives_through_the_host, algorithm, torch.float32)
    for dtype in ("float64", "bfloat16", "float16", "int64"):
        if algorithm == "direct":
            pool.run(collectives, algorithm, getattr(torch, dtype))


@on_each_rank
def test_the_own_row_may_be_in_the_buffer() -> None:
    me, ranks = rank(), world_size()
    buffer = torch.full((4 * ranks,), float(me + 1))
    own = buffer[4 * me : 4 * me + 4]
    comm.reduce_scatter(own, buffer)
    comm.all_gather(buffer, own)
    assert buffer.eq(ranks * (ranks + 1) / 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordered_sum(dtype: torch.dtype) -> None:
    """Neighbours first; in memory of the caller's, but 16 bits are summed in fp32."""
    parts = [torch.tensor([x], dtype=dtype) for x in (1e8, 1.0, -1e8, 1.0)]
    assert comm.ordered_sum(parts) == 0
    ones, out = list(torch.ones(5, 3, dtype=dtype)), torch.empty(3, dtype=dtype)
    total = comm.ordered_sum(ones, True, out)
    assert total.eq(1).all() and (total is out) is (dtype is torch.float32)


@on_each_rank
def test_16_bit_sums_are_rounded_once() -> None:
    """bf16: 1 + 1/256 + 1/256 is 1 when rounded twice, more when rounded once."""
    t = torch.tensor([1.0 if rank() == 0 else 1 / 256], dtype=torch.bfloat16)
    comm.all_reduce(t)
    assert world_size() != 3 or t.item() == 1 + 1 / 128


@on_each_rank
@each_algorithm
def test_means_fit_where_sums_do_not(algorithm: str) -> None:
    """Of fp16 whose sum would be infinite; of fp32 as the sum is, divided."""
    me, n = rank(), world_size()
    with comm.algorithm(algorithm):
        large = torch.full((5,), 60000.0, dtype=torch.float16)
        row = large.new_zeros(-(-5 // n))
        comm.reduce_scatter(row, large, average=True)
        assert row[: max(0, min(len(row), 5 - me * len(row)))].eq(large[0]).all()
        comm.all_reduce(large, average=True)
        assert large.eq(60000.0).all()
    t = values(12, me) / 3
    mean = t.clone()
    comm.all_reduce(t)
    comm.all_reduce(mean, average=True)
    assert torch.equal(mean, t / n)


@on_two_ranks
def test_the_device_of_a_tensor_chooses_the_algorithm() -> None:
    """For a tensor of the host, and for one that another backend moves."""
    with patch.object(dist, "get_backend_config", lambda world: "cpu:gloo,meta:nccl"):
        tensors = [torch.empty(1, device=on) for on in ("cpu", "meta")]
        found = [comm.current_algorithm(t) for t in tensors]
    assert found == ["direct", "backend"]


Counted = list[tuple[object, ...]]


def counted(algorithm: str) -> tuple[Counted, str]:
    ranks = world_size()
    t, row = torch.zeros(6 * ranks), torch.zeros(6)
    with comm.algorithm(algorithm), comm.ledger() as calls:
        with comm.phase("forward", "unit"):
            comm.all_gather(t, row)
        with comm.phase("backward"), comm.ledger() as inner:
            work = comm.reduce_scatter(row, t, async_op=True)
            assert calls[-1].finished == 0
            work.wait()
            work.wait()
        comm.all_reduce(t)
        comm.broadcast(t)
    comm.all_reduce(t)  # after the ledger has been closed
    for call in calls:
        assert call.launched <= call.returned <= call.waited <= call.finished
    assert list(inner) == [calls[1]]
    assert calls.sent() == sum(c.sent for c in calls)
    kept = ("op", "elements", "sent", "bytes", "group", "phase", "unit")
    rows = [tuple(getattr(call, name) for name in kept) for call in calls]
    return rows, calls.table()


@each_algorithm
def test_the_ledger(pool: Pool, algorithm: str) -> None:
    results = pool.run(counted, algorithm)
    n = len(results)
    for r, (seen, table) in enumerate(results):
        share = 6 * (n - 1)
        cast = 6 * n * (n - 1) if r == 0 else 0
        assert seen == [
            ("all_gather", 6 * n, share, 4 * share, "all", "forward", "unit"),
            ("reduce_scatter", 6 * n, share, 4 * share, "all", "backward", ""),
            ("all_reduce", 6 * n, 2 * share, 8 * share, "all", "", ""),
            ("broadcast", 6 * n, cast, 4 * cast, "all", "", ""),
        ]
        assert f"all_reduce           1{2 * share:14,}" in table


@on_each_rank
def test_callbacks_run_once() -> None:
    order: list[str] = []
    work = comm.all_reduce(torch.zeros(2), async_op=True)
    work.then(lambda: order.append("first"))
    assert order == []
    work.wait()
    work.then(lambda: order.append("late"))
    work.wait()
    assert order == ["first", "late"]


@on_each_rank
@each_algorithm
def test_columns_are_rows(algorithm: str) -> None:
    """Rows that are columns of a table, as a bucket of every shard is."""
    me, ranks = rank(), world_size()
    with comm.algorithm(algorithm):
        tables = [values(10 * ranks, r).view(-1, 10) for r in range(ranks)]
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


def grouped(algorithm: str) -> tuple[list[int], list[int], list[tuple[str, int]]]:
    """Sums over pairs and over pairs of pairs; pair 0 makes one call more."""
    groups, me = comm.Groups(2), rank()
    row, column = torch.tensor([10**me]), torch.tensor([10**me])
    with comm.algorithm(algorithm), comm.ledger() as calls:
        comm.all_reduce(row, group=groups.within)
        if groups.number == 0:
            comm.broadcast(torch.zeros(3), src=1, group=groups.within)
        comm.all_reduce(column, group=groups.across)
        comm.check_sequence()
    assert groups.across.rank == groups.number and groups.within.size == 2
    return row.tolist(), column.tolist(), [(c.group, c.sent) for c in calls]


def test_groups_make_their_own_calls() -> None:
    with Pool(4) as pool:
        runs = [pool.run(grouped, how) for how in comm.ALGORITHMS]
    for r, (row, column, calls) in [each for run in runs for each in enumerate(run)]:
        assert row == [11 * 100 ** (r // 2)] and column == [101 * 10 ** (r % 2)]
        assert ("across", 1 - (r // 2)) in calls or ("across", 1) in calls
        assert len(calls) == (3 if r < 2 else 2)


def quantized(bits: int) -> tuple[Tensor, Tensor, list[tuple[str, int]]]:
    """A mean and a gather, of which the rows are exact in so few bits."""
    how, me, n = comm.Quantized(bits, 128), rank(), world_size()
    row, inp = torch.empty(256), values(256 * n, me).clamp(-7, 7)
    full, uneven = torch.empty(256 * n), torch.ones(257)
    with comm.ledger() as calls:
        comm.reduce_scatter(row, inp, average=True, quantized=how)
        comm.all_gather(full, inp[:256], quantized=how)
    comm.all_reduce(uneven, average=True, quantized=comm.Quantized(bits))
    assert uneven.eq(1).all() and how.nbytes(256) == 2 * (128 * bits // 8 + 1)
    return row, full, [(c.dtype, c.bytes) for c in calls]


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_sent_in_few_bits(pool: Pool, bits: int) -> None:
    found = pool.run(quantized, bits)
    n = len(found)
    inputs = [values(256 * n, r).clamp(-7, 7) for r in range(n)]
    for r, (row, full, calls) in enumerate(found):
        mean = sum(inputs)[256 * r : 256 * (r + 1)] / n
        assert torch.equal(row, mean)
        assert torch.equal(full, torch.cat([each[:256] for each in inputs]))
        sent = (n - 1) * 2 * (128 * bits // 8 + 1)
        assert calls == [(f"int{bits}", sent)] * 2


MISUSE: dict[str, Callable[[], object]] = {
    "make them equal": lambda: comm.reduce_scatter(torch.zeros(99), torch.zeros(4)),
    "row given has 99": lambda: comm.all_gather(torch.zeros(4), torch.zeros(99)),
    "no rank 9": lambda: comm.broadcast(torch.zeros(4), src=9),
    ".contiguous()": lambda: comm.all_reduce(torch.zeros(4, 4).t()),
    "not 'telepathy'": lambda: comm.algorithm("telepathy").__enter__(),
    "8 or 4 bits, not 5": lambda: comm.Quantized(5),
    "groups of 9 ranks": lambda: comm.Groups(9),
}


@on_each_rank
def test_misuse_is_told() -> None:
    for words, wrong in MISUSE.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            wrong()


def mixed() -> None:
    """Two calls of one size, which the backend mixes in silence."""
    with comm.algorithm("backend"):
        with comm.phase(unit=f"unit {rank()}"):
            comm.all_reduce(torch.zeros(8))
        with pytest.raises(RuntimeError, match="have not made the same collectives"):
            comm.check_sequence()


@on_cpu_only
def test_calls_that_the_backend_mixes_are_found() -> None:
    with Pool(2) as pool:  # of its own: the calls of its ranks differ from now on
        pool.run(mixed)


@on_two_ranks
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    assert comm.gather_objects(f"from rank {rank()}") == ["from rank 0", "from rank 1"]
    with pytest.raises(LookupError, match="rank 1 has"), comm.agreeing(LookupError):
        if rank() == 1:
            raise ValueError(f"rank {rank()} has lost something")
