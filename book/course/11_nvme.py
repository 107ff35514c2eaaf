"""Chapter 11: state on disk."""

import tempfile

import torch

from minizero import NVMe, Plan, parallelize
from minizero.lab.course import Exercise, Wrong, always_fails
from minizero.lab.course.drivers import kills
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.offload.staging import StagingBuffers


class HowLargeABuffer(Exercise):
    label = "ex-nvme-1"
    answer = "buffer_bytes"
    book = {
        "optimizer": "nvme", "gradients": "cpu", "parameters": "device",
        "mixed": True, "count": 4, "size": 17_856_512,
    }  # fmt: skip
    starter = """
def buffer_bytes(
    optimizer: str, gradients: str, parameters: str, mixed: bool, count: int, size: int
) -> int:
    # Bytes of `count` buffers for slices of `size` elements, for Adam. The first three
    # are "device", "cpu" or "nvme". `mixed`: bf16 and fp32 masters, else all fp32.
    return 0
"""
    public = """
assert buffer_bytes("nvme", "cpu", "cpu", False, 1, 1024) == 3 * 4096
"""
    reference = """
def buffer_bytes(optimizer, gradients, parameters, mixed, count, size):
    itemsize, page = 2 if mixed else 4, 4096
    records = [(parameters, itemsize), (gradients, itemsize)]
    records += [(optimizer, 4)] * (2 + mixed)  # moments, a master copy
    sections = [size * n for place, n in records if place != "cpu"]
    return count * page * (sum(-(-n // page) for n in sections) + 1)
"""
    wrong = (
        Wrong(
            "on the host",
            ' if place != "cpu"',
            "",
            "You gave a section to what is on the host: it is used where it is.",
        ),
        Wrong(
            "on the device",
            'if place != "cpu"',
            'if place == "nvme"',
            "You left out what is on the device: the host updates it, so it needs a"
            " section, too.",
        ),
        Wrong(
            "master copy",
            "(2 + mixed)",
            "2",
            "You left out the master copy, which mixed precision updates.",
        ),
        Wrong(
            "one buffer",
            "count * page",
            "page",
            "You counted one buffer: there are `count`.",
        ),
        Wrong(
            "parts of pages",
            "-(-n // page)",
            "n // page",
            "You rounded down: a section is whole pages, so it is rounded up.",
        ),
        Wrong(
            "alignment",
            " + 1)",
            ")",
            "You left out the page by which each buffer is longer than its sections.",
        ),
    )

    def draw(self, rng):
        def case():
            return {
                "optimizer": "nvme", "gradients": rng.choice(["cpu", "device"]),
                "parameters": rng.choice(["cpu", "device", "nvme"]), "mixed": True,
                "count": rng.randint(3, 9), "size": 64 * rng.randint(99, 9999),
            }  # fmt: skip

        plain = {"mixed": False, "optimizer": "cpu", "parameters": "nvme"}
        return [*self.telling(case, 2), case() | plain]


class WhatAStepMoves(Exercise):
    label = "ex-nvme-2"
    answer = "traffic"
    points = 8
    starter = """
def traffic(storage, work) -> tuple[int, int]:
    # Calls `work()` once. How many bytes `storage`, an NVMe, reads from its file
    # meanwhile, and how many it writes. Its swap file is afterwards as it was.
    work()
    return 0, 0
"""
    public = """
from types import SimpleNamespace


class Swap:
    def read(self, offset, buffer):
        return "a transfer"

    write = read


assert tuple(traffic(SimpleNamespace(swap=Swap()), lambda: None)) == (0, 0)
"""
    reference = """
from unittest.mock import patch


def traffic(storage, work):
    moved, swap = {"read": 0, "write": 0}, storage.swap

    def counted(way):
        launch = getattr(swap, way)

        def call(offset, buffer):
            moved[way] += buffer.nbytes
            return launch(offset, buffer)

        return patch.object(swap, way, call)

    with counted("read"), counted("write"):
        work()
    return moved["read"], moved["write"]
"""
    wrong = (
        Wrong(
            "requests",
            "moved[way] += buffer.nbytes",
            "moved[way] += 1",
            "You counted transfers: each moves as many bytes as its buffer has.",
        ),
        Wrong(
            "size of the file",
            'moved["read"], moved["write"]',
            "swap.size, swap.size",
            "You returned the size of the file: a step moves some of it more than once,"
            " and some not at all.",
        ),
        Wrong(
            "read as written",
            'moved["read"], moved["write"]',
            'moved["write"], moved["read"]',
            "You gave first what is written, then what is read.",
        ),
        Wrong(
            "left in place",
            "return patch.object(swap, way, call)",
            "setattr(swap, way, call)\n        return patch.dict({})",
            "Your counters stay in the swap file: everything later passes them too.",
        ),
    )
    explain = "Which plan wears a drive out, and why accumulation does not."

    def draw(self, rng):
        plans = [("nvme", None), (None, "nvme"), ("nvme", "nvme")]
        return [
            {
                "optimizer": optimizer, "parameters": parameters,
                "micro": rng.randint(2, 5), "hidden": 16 * rng.randint(2, 6),
            }
            for optimizer, parameters in plans
        ]  # fmt: skip

    @staticmethod
    def run(answer, optimizer, parameters, micro, hidden):
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan.stage(3, optimizer, parameters)
            storage = NVMe(plan, folder, buffer_size=1 << 12)
            model = GPT(GPTConfig(2, hidden, 2, sequence=16, vocabulary=50))
            adamw = torch.optim.AdamW(model.parameters())
            net = parallelize(model, adamw, plan, storage=storage)
            made = []

            def step():
                for _ in range(micro):
                    x = torch.randint(50, (1, 16))
                    net.backward(net(x, x))
                net.step()
                made.append(micro)

            step(), step()
            own = storage.swap.read, storage.swap.write
            read, written = answer(storage, step)
            left = storage.swap.read, storage.swap.write
            storage.close()
        return {
            "bytes read": read,
            "bytes written": written,
            "steps": len(made) - 2,
            "the swap file is as it was": left == own,
        }


class GivenBack(Exercise):
    label = "ex-nvme-3"
    answer = "check_buffers"
    points = 8
    starter = """
def check_buffers(buffers) -> None:
    # A test of `buffers`, a new StagingBuffers with a single buffer: an AssertionError
    # unless a buffer that was given back with uses (anything with `synchronize()`
    # and `query()`) is handed out again when all of them are over, and nothing waits
    # before that.
    buffer = buffers.take()
    buffers.give(buffer)
    assert buffers.take() is buffer
"""
    public = """
from minizero.offload.staging import StagingBuffers

buffers = StagingBuffers(1)
buffers.reserve(64)
check_buffers(buffers)  # nothing is wrong with it
"""
    reference = """
class Use:
    def __init__(self):
        self.over = False

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True


def check_buffers(buffers):
    uses = [Use(), Use()]
    buffers.give(buffers.take(), uses)
    assert not any(use.over for use in uses)
    buffers.take()
    assert all(use.over for use in uses)
"""
    wrong = (
        Wrong(
            "one use",
            "uses = [Use(), Use()]",
            "uses = [Use()]",
            "Your buffer has one use: a pool that waits for the first of several passes"
            " your test.",
        ),
        Wrong(
            "at once",
            "    assert not any(use.over for use in uses)\n",
            "",
            "A pool that waits in `give` passes your test: it is right, and no write"
            " overlaps with anything.",
        ),
        Wrong(
            "never asked",
            "    assert all(use.over for use in uses)\n",
            "",
            "Your test does not ask whether the uses are over when the buffer is handed"
            " out again.",
        ),
        always_fails("assert all("),
    )
    explain = "What the file holds afterwards, and why no error is raised."

    def draw(self, rng):
        mutants = ["waits for none", "waits for one", "waits at once"]
        return [{"mutant": name, "size": rng.randint(1, 999)} for name in mutants]

    @staticmethod
    def run(answer, mutant, size):
        def make(name):
            class Buffers(StagingBuffers):
                def give(self, buffer, uses=()):
                    if name == "waits at once":
                        for use in uses:
                            use.synchronize()
                    kept = {"": uses, "waits for one": uses[:1]}.get(name, ())
                    super().give(buffer, kept)

            buffers = Buffers(1)
            buffers.reserve(size)
            return buffers

        return kills(0, answer, make, mutant)


class Pipelined(Exercise):
    label = "ex-nvme-4"
    answer = "pipelined"
    points = 8
    starter = """
def pipelined(slices: int, count: int, read, update, write) -> None:
    # Updates slices 0, 1, ... by `update(i, b)`, each in a buffer 0 <= b < count, with
    # count >= 2. `read(i, b)` launches the read of slice i into buffer b, `write(i, b)`
    # its write; both return a transfer, whose `synchronize()` waits for it. The next
    # slice is read and the last one is written during an update.
    for i in range(slices):
        read(i, 0).synchronize()
        update(i, 0)
        write(i, 0)
"""
    public = """
class Done:
    def synchronize(self):
        pass


updated = []
pipelined(
    3, 2, lambda i, b: Done(), lambda i, b: updated.append(i), lambda i, b: Done()
)
assert updated == [0, 1, 2]
"""
    reference = """
def pipelined(slices, count, read, update, write):
    reads, writes = {0: read(0, 0)}, {}
    for i in range(slices):
        b, following = i % count, (i + 1) % count
        if i + 1 < slices:
            if following in writes:
                writes.pop(following).synchronize()
            reads[i + 1] = read(i + 1, following)
        reads.pop(i).synchronize()
        update(i, b)
        writes[b] = write(i, b)
    for last in writes.values():
        last.synchronize()
"""
    wrong = (
        Wrong(
            "nothing ahead",
            "        reads.pop(i).synchronize()\n",
            "        for each in reads.values():\n            each.synchronize()\n",
            "You wait for the read of the next slice before the update of this one:"
            " they do not overlap.",
        ),
        Wrong(
            "waits for each write",
            "        writes[b] = write(i, b)\n",
            "        write(i, b).synchronize()\n",
            "You wait for each write at once: it does not overlap with the next"
            " update.",
        ),
        Wrong(
            "buffer in use",
            "                writes.pop(following).synchronize()\n",
            "                writes.pop(following)\n",
            "You read into a buffer whose write is still under way: the file gets the"
            " next slice in its place.",
        ),
        Wrong(
            "end not waited for",
            "    for last in writes.values():\n        last.synchronize()\n",
            "",
            "You return while the last slices are still being written: nobody waits for"
            " them.",
        ),
    )

    def draw(self, rng):
        counts = rng.sample([2, 3, 4, 5], 3)
        return [{"slices": rng.randint(7, 12), "count": n} for n in sorted(counts)]

    @staticmethod
    def run(answer, slices, count):
        disk, memory = list(range(slices)), [None] * count
        launched = {}  # transfers under way, by kind and slice: the buffer
        clean, ahead, behind = [], [], []

        class Transfer:
            """It takes place when it is waited for, as on the slowest disk."""

            def __init__(self, kind, i, b):
                self.key, self.b = (kind, i), b
                clean.append(b not in launched.values() and 0 <= b < count)
                launched[self.key] = b

            def synchronize(self):
                if launched.pop(self.key, None) is None:
                    return
                kind, i = self.key
                if kind == "read":
                    memory[self.b] = disk[i]
                else:
                    disk[i] = memory[self.b]

        def update(i, b):
            clean.append(b not in launched.values() and memory[b] == i)
            ahead.append(("read", i + 1) in launched or i + 1 == slices)
            behind.append(("write", i - 1) in launched or i == 0 or count == 2)
            memory[b] = i + slices

        answer(
            slices, count, lambda i, b: Transfer("read", i, b), update,
            lambda i, b: Transfer("write", i, b),
        )  # fmt: skip
        return {
            "written": disk == [i + slices for i in range(slices)],
            "no buffer is used twice at a time": all(clean),
            "the next is read during an update": all(ahead),
            "the last is written during an update": all(behind),
        }


class TokensForADisk(Exercise):
    label = "ex-nvme-5"
    answer = "sequences"
    points = 8
    book = {"read": 52e9, "flops": 124.8e12, "gpus": 8, "length": 4096, "goal": 0.8}
    starter = """
from minizero.lab.hardware import efficiency, intensity


def sequences(read: float, flops: float, gpus: int, length: int, goal: float) -> int:
    # The fewest sequences a GPU and step that reach the efficiency `goal`: optimizer
    # state on the disks of one node, which read `read` bytes/s and write half as fast;
    # a GPU does `flops` FLOP/s.
    return 0
"""
    public = """
assert sequences(1e18, 1e12, 8, 1024, 0.5) == 1  # a disk that takes no time
"""
    reference = """
from minizero.lab.hardware import efficiency, intensity


def sequences(read, flops, gpus, length, goal):
    write = read / 2
    mean = 2 / (1 / read + 1 / write)  # as much written as read
    found = 1
    while True:
        each = gpus * intensity("optimizer", length, found)
        if efficiency(each, mean / gpus, flops) >= goal:
            return found
        found += 1
"""
    wrong = (
        Wrong(
            "writes free",
            "mean = 2 / (1 / read + 1 / write)",
            "mean = read",
            "You moved everything at the speed of reading: half of the bytes are"
            " written, and take twice as long.",
        ),
        Wrong(
            "arithmetic mean",
            "mean = 2 / (1 / read + 1 / write)",
            "mean = (read + write) / 2",
            "You took the mean of the two speeds: what adds up are the times.",
        ),
        Wrong(
            "share of the states forgotten",
            "gpus * intensity",
            "intensity",
            "A GPU computes on its tokens for all parameters and moves only its share"
            " of the states: that is `gpus` times the operations a byte.",
        ),
    )
    explain = "What changes if the update overlaps with the next forward."

    def draw(self, rng):
        def case():
            return {
                "read": rng.randint(20, 60) * 1e9, "flops": rng.randint(9, 40) * 1e13,
                "gpus": rng.choice([4, 6, 16]), "length": rng.choice([2048, 3072]),
                "goal": rng.choice([0.6, 0.75, 0.9]),
            }  # fmt: skip

        return self.telling(case, 2)
