"""Chapter 12: checkpoints."""

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from minizero.lab.course import Exercise, Wrong


class BytesOnDisk(Exercise):
    label = "ex-checkpoint-1"
    answer = "checkpoints"
    book = {"params": 7e9, "frozen": 6e9, "ranks": 64, "speed": 1e9}
    starter = """
def checkpoints(
    params: float, frozen: float, ranks: int, speed: float
) -> list[tuple[float, float]]:
    # GB of a checkpoint, and seconds to write it on ranks of `speed` bytes/s each: in
    # fp32 with SGD with momentum; in bf16 with fp32 masters and Adam, if so many of the
    # parameters are `frozen`.
    return [(0.0, 0.0), (0.0, 0.0)]
"""
    public = """
gigabytes, seconds = checkpoints(1e9, 5e8, 1, 1e9)[0]
assert gigabytes == seconds
"""
    reference = """
def checkpoints(params, frozen, ranks, speed):
    sizes = [params * (4 + 4), (params - frozen) * (4 + 4 + 4) + frozen * 2]
    return [(size / 1e9, size / ranks / speed) for size in sizes]
"""
    wrong = (
        Wrong(
            "all 16 bytes",
            "* (4 + 4 + 4)",
            "* (2 + 2 + 4 + 4 + 4)",
            "You saved gradients and rounded copies too: gradients are gone after the"
            " step, and a rounded copy is made from the master.",
        ),
        Wrong(
            "gradients",
            "params * (4 + 4),",
            "params * (4 + 4 + 4),",
            "You saved the fp32 gradients: no step needs them any more.",
        ),
        Wrong(
            "no masters",
            "* (4 + 4 + 4)",
            "* (2 + 4 + 4)",
            "You saved the bf16 parameters in the masters' place: then a resumed run"
            " goes on from other weights.",
        ),
        Wrong(
            "frozen masters",
            "frozen * 2",
            "frozen * 4",
            "You saved a frozen parameter in fp32: only what is updated has a master.",
        ),
        Wrong(
            "nothing frozen",
            " + frozen * 2",
            "",
            "You left frozen parameters out: the model that loads needs them, too.",
        ),
        Wrong(
            "one writes all",
            "size / ranks / speed",
            "size / speed",
            "You let one rank write everything: each writes its shard, all at once.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "params": rng.randint(500, 900) * 1e8,
                "frozen": rng.randint(50, 400) * 1e8, "ranks": n, "speed": speed * 1e9,
            }
            for n, speed in zip(
                rng.sample([3, 6, 12, 48], 2), rng.sample([0.5, 1.5, 2, 3], 2),
                strict=True,
            )
        ]  # fmt: skip


class HowManyFiles(Exercise):
    label = "ex-checkpoint-2"
    answer = "files"
    points = 6
    book = {"numel": 51, "saved": 4, "loaded": 3}
    starter = """
def files(numel: int, saved: int, loaded: int) -> tuple[int, int]:
    # A buffer was saved by `saved` ranks and is loaded by `loaded`; a shard has the
    # number of elements divided by the ranks, rounded up. In how many old shards are
    # the elements of a new one, at most, and of all new ones, added up?
    return 0, 0
"""
    public = """
assert files(12, 1, 4) == (1, 4)
"""
    reference = """
def files(numel, saved, loaded):
    old, new = -(-numel // saved), -(-numel // loaded)
    counts = []
    for first in range(0, numel, new):
        last = min(first + new, numel) - 1
        counts.append(last // old - first // old + 1)
    return max(counts), sum(counts)
"""
    wrong = (
        Wrong(
            "even shares",
            "return max(counts), sum(counts)",
            "return -(-saved // loaded), sum(counts)",
            "That is M/N rounded up: the ends of a shard need not fall on those of old"
            " ones.",
        ),
        Wrong(
            "the bound",
            "return max(counts), sum(counts)",
            "return -(-saved // loaded) + 1, sum(counts)",
            "That is the bound: not every pair of numbers reaches it.",
        ),
        Wrong(
            "each file once",
            "return max(counts), sum(counts)",
            "return max(counts), saved",
            "You counted each old file once: one in which a new shard begins is read by"
            " two ranks.",
        ),
    )
    explain = "The bound, and why it holds for every number of elements."

    def draw(self, rng):
        def case(reached):
            while True:
                m, n = rng.randint(2, 24), rng.randint(2, 24)
                found = {"numel": rng.randint(400, 999), "saved": m, "loaded": n}
                if (self.right(**found)[0] == -(-m // n) + 1) == reached:
                    return found

        return [case(True), case(False), case(True)]

    @staticmethod
    def right(numel, saved, loaded):
        old, new = -(-numel // saved), -(-numel // loaded)
        counts = [
            (min(a + new, numel) - 1) // old - a // old + 1
            for a in range(0, numel, new)
        ]
        return max(counts), sum(counts)


class PointerFirst(Exercise):
    label = "ex-checkpoint-3"
    answer = "lost"
    book = {"before": 1, "files": 1, "pointer_first": True}
    starter = """
def lost(changes: list[str]) -> int:
    # A save makes these changes in this order. A kill may come before each of them, and
    # after the last: after how many of these kills is there no checkpoint for `load()`?
    # "replace latest" lets `latest` name the new folder, "replace index" puts the index
    # of the new checkpoint there; there is an older checkpoint.
    return -1
"""
    public = """
assert lost(["mkdir", "replace index", "replace latest"]) == 0
"""
    reference = """
def lost(changes):
    pointed, decided = map(changes.index, ("replace latest", "replace index"))
    return max(0, decided - pointed)
"""
    wrong = (
        Wrong(
            "after the index",
            "decided - pointed",
            "len(changes) - pointed if decided > pointed else 0",
            "You counted the kills after the index is there: then what `latest` names"
            " loads.",
        ),
        Wrong(
            "from the first change",
            "decided - pointed",
            "decided + 1 if decided > pointed else 0",
            "You counted the kills before `latest` was replaced: it still names the"
            " older checkpoint.",
        ),
        Wrong(
            "either order",
            "max(0, decided - pointed)",
            "abs(decided - pointed)",
            "You count a save that writes the index first: between the two, `latest`"
            " names the older checkpoint.",
        ),
    )

    def draw(self, rng):
        return [
            {"before": rng.randint(1, 3), "files": n, "pointer_first": first}
            for n, first in zip(rng.sample(range(2, 9), 3), (1, 0, 1), strict=True)
        ]

    @staticmethod
    def run(answer, before, files, pointer_first):
        put = ["open", "write", "fsync", "replace", "open", "fsync"]
        decide = [name.replace("replace", "replace index") for name in put]
        point = [name.replace("replace", "replace latest") for name in put]
        changes = ["mkdir"] * before + point * bool(pointer_first)
        changes += put * files + decide + point * (not pointer_first)
        return answer(changes)


class KeepTheLastTwo(Exercise):
    label = "ex-checkpoint-4"
    answer = "keeping_save"
    points = 8
    starter = """
import json
import os


def keeping_save(folder, tag: str, keep: int, rank: int, small_save) -> None:
    # `small_save(folder, tag)` saves. After that only the newest `keep` checkpoints may
    # stay, and no files of others. Each is a folder beside `latest`, with the number of
    # its save in its index: `json.loads((path / "index.json").read_bytes())["number"]`.
    # What has no index is no checkpoint. All ranks call this.
    small_save(folder, tag)
"""
    public = """
import pathlib
import tempfile

saved = []
with tempfile.TemporaryDirectory() as name:
    keeping_save(pathlib.Path(name), "a", 2, 0, lambda folder, tag: saved.append(tag))
assert saved == ["a"]
"""
    reference = """
import json


def number(index):
    return json.loads(index.read_bytes())["number"]


def keeping_save(folder, tag, keep, rank, small_save):
    small_save(folder, tag)
    if rank != 0:
        return
    for index in sorted(folder.glob("*/index.json"), key=number)[:-keep]:
        index.unlink()  # no checkpoint from here on
        for file in index.parent.iterdir():
            file.unlink()
        index.parent.rmdir()
"""
    wrong = (
        Wrong(
            "index last",
            "        index.unlink()  # no checkpoint from here on\n",
            "",
            "You do not delete the index before the other files: a kill between them"
            " leaves an index whose files have gone.",
        ),
        Wrong(
            "before the pointer",
            "",
            """
import json


def number(index):
    return json.loads(index.read_bytes())["number"]


def keeping_save(folder, tag, keep, rank, small_save):
    indexes = sorted(folder.glob("*/index.json"), key=number)
    for index in indexes[: len(indexes) + 1 - keep] if rank == 0 else ():
        index.unlink()
        for file in index.parent.iterdir():
            file.unlink()
        index.parent.rmdir()
    small_save(folder, tag)
""",
            "You delete before the new checkpoint is there: a kill between the two"
            " leaves one too few, perhaps none.",
        ),
        Wrong(
            "by name",
            "key=number",
            "key=lambda p: p.parent.name",
            "You take the last names for the newest checkpoints: step-10 comes before"
            " step-9.",
        ),
        Wrong(
            "every rank deletes",
            "    if rank != 0:\n        return\n",
            "",
            "Every rank deletes: they take each other's files away, and some raise.",
        ),
    )

    def draw(self, rng):
        return [
            {"first": high - rng.randint(0, k), "saves": k + 1, "keep": k}
            for k, high in zip((1, 2), rng.sample([9, 99, 999], 2), strict=True)
        ]

    @staticmethod
    def run(answer, first, saves, keep):
        class Killed(BaseException):
            pass

        class Entries(list):
            __enter__ = list.copy

            def __exit__(self, *error):
                pass

        def save(folder, tag):
            path = folder / tag
            path.mkdir()
            index = {"number": int(tag.removeprefix("step-"))}
            (path / "rank-0").write_text(tag)
            (path / "index.tmp").write_text(json.dumps(index))
            os.replace(path / "index.tmp", path / "index.json")
            (folder / "latest.tmp").write_text(tag)
            os.replace(folder / "latest.tmp", folder / "latest")

        def prepared():
            folder = Path(tempfile.mkdtemp())
            for i in range(saves):
                save(folder, f"step-{first + i}")
            return folder

        def checkpoints(folder):
            return [p for p in folder.iterdir() if (p / "index.json").exists()]

        def is_whole(path):
            return all((path / name).exists() for name in ("rank-0", "index.json"))

        def index_last(listed):
            """In this order on every file system: `rmtree` would be right on some."""

            def listing(*args):
                return Entries(sorted(listed(*args), key=os.fspath, reverse=True))

            return listing

        tag, killed, seen = f"step-{first + saves}", True, []
        while killed:
            folder, left = prepared(), iter(range(len(seen)))

            def counted(change, left=left):
                def counting(*args, **options):
                    if next(left, None) is None:
                        raise Killed
                    return change(*args, **options)

                return counting

            with ExitStack() as stack:
                for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
                    change = counted(getattr(os, name))
                    stack.enter_context(mock.patch.object(os, name, change))
                for name in ("listdir", "scandir"):
                    listing = index_last(getattr(os, name))
                    stack.enter_context(mock.patch.object(os, name, listing))
                try:
                    answer(folder, tag, keep, 0, save)
                    killed = False
                except Killed:
                    pass
            latest = folder / (folder / "latest").read_text()
            found = checkpoints(folder)
            seen.append((is_whole(latest), len(found), all(map(is_whole, found))))
        other = prepared()
        answer(other, "none", keep, 1, lambda folder, tag: None)
        return {
            "load() finds one after each kill": all(loads for loads, _, _ in seen),
            "as many as are kept, after each kill": min(n for _, n, _ in seen) >= keep,
            "half a checkpoint after some kill": not all(whole for *_, whole in seen),
            "kept at the end": sorted({p.parent.name for p in folder.glob("*/*")}),
            "deleted by another rank": saves - len(checkpoints(other)),
        }


class TwoLevels(Exercise):
    label = "ex-checkpoint-5"
    answer = "levels"
    points = 8
    book = {
        "params": 405e9, "speed": 200e9, "copy": 2.0, "between": 11160.0, "both": 20
    }  # fmt: skip
    starter = """
from minizero.lab.explorables.interval import best_interval, lost


def levels(
    params: float, speed: float, copy: float, between: float, both: int
) -> list[float]:
    # Adam in mixed precision, disks of `speed` bytes/s in all, a failure every
    # `between` seconds; a copy in a neighbour's memory takes `copy` seconds, and one
    # failure in `both` takes both nodes. Seconds between saves to disk alone and the
    # share lost; then seconds between copies to memory, between saves to disk, and the
    # share lost in all.
    return [0.0, 0.0, 0.0, 0.0, 0.0]
"""
    public = """
assert len(levels(1e9, 1e9, 1.0, 3600.0, 10)) == 5
"""
    reference = """
from minizero.lab.explorables.interval import best_interval, lost


def levels(params, speed, copy, between, both):
    disk = 12 * params / speed
    alone = best_interval(disk, between)
    often = best_interval(copy, between)
    rarely = best_interval(disk, both * between)
    total = lost(often, copy, between) + lost(rarely, disk, both * between)
    return [alone, lost(alone, disk, between), often, rarely, total]
"""
    wrong = (
        Wrong(
            "disk as often",
            "both * between",
            "between",
            "You save to disk as if each failure needed it: with copies in memory only"
            " one in so many does.",
        ),
        Wrong(
            "one level's loss",
            " + lost(rarely, disk, both * between)",
            "",
            "You counted what the copies to memory lose: the saves to disk lose time"
            " too.",
        ),
        Wrong(
            "16 bytes",
            "12 * params",
            "16 * params",
            "You saved gradients and rounded parameters too: 12 bytes per parameter are"
            " enough.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "params": rng.randint(3, 80) * 1e10, "speed": rng.randint(5, 30) * 1e10,
                "copy": rng.choice([1.0, 3.0]), "between": rng.randint(2, 20) * 1e3,
                "both": rng.choice([5, 10, 15, 30]),
            }
            for _ in range(2)
        ]  # fmt: skip
