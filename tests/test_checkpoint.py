"""What is saved and kept; a damaged checkpoint is refused, and the net is unchanged.

That a save counts or does not, whenever it is killed, chapter 12 shows at each change
of a file, and `kills.py` with real jobs.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nasty import on_two_ranks, same
from torch import Tensor, nn

from minizero import Plan, comm, parallelize
from minizero.checkpoint import CheckpointError, exists, finish, load, read_extra, save
from minizero.ranks import Pool, device, rank
from minizero.zero import DataParallel

WIDTH = 6
MODULE: Any = sys.modules["minizero.checkpoint.commit"]


def net_of(seed: int = 0, stage: int = 3, **how: Any) -> DataParallel:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.AdamW(module.parameters())
    return parallelize(module, optimizer, Plan.stage(stage), **how)


def step(net: DataParallel) -> None:
    net.backward(net(torch.rand(4, WIDTH)).square().sum())
    net.step()


def state(net: DataParallel) -> dict[str, Tensor]:
    """All tensors that a load can change, copied."""
    found = {f"buffer {k}": b for k, b in net.model.named_buffers()}
    for n, flat in enumerate(net.flats):
        found[f"{n}"] = flat.master
        found |= {f"{n} {k}": v for k, v in net.optimizer.state[flat.master].items()}
    found["random"] = torch.get_rng_state()
    return {k: v.clone() for k, v in found.items()}


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def complete(folder: Path, *tags: str, ranks: int = 1) -> bool:
    """Whether a folder has these checkpoints, `latest`, and nothing else."""
    files = [f"rank-{r:04d}-of-{ranks:04d}-*.safetensors" for r in range(ranks)]
    expected = [f"{tag}/{name}" for tag in tags for name in ("index.json", *files)]
    folders = {p.name for p in folder.iterdir() if p.is_dir()}
    found = [re.sub(r"-\w{8}(?=\.)", "-*", name) for name in names(folder)]
    return sorted(found) == sorted(["latest", *expected]) and folders == {*tags}


def test_only_what_saves_have_left_is_swept(tmp_path: Path) -> None:
    net = net_of()
    save(net, tmp_path, "a")
    file = "rank-0001-of-0002-0123abcd.safetensors"
    ours = [f"a/{file}", f"killed/{file}", "a/index.json.tmp", "latest.tmp"]
    theirs = ["a/notes.txt", "b/index.json", f"b/{file}", "notes.tmp", "c/weights"]
    for name in ours + theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    kept = {*names(tmp_path)} - {*ours}
    for tag in ("d", "d"):  # over a checkpoint of the same tag, too
        save(net, tmp_path, tag)
        mine = {name for name in names(tmp_path) if not name.startswith("d/")}
        assert mine == kept and len([*tmp_path.glob("d/*")]) == 2
    assert not (tmp_path / "killed").exists()


# Which one is found, and which are kept


def test_which_is_found_and_which_are_kept(tmp_path: Path) -> None:
    net = net_of()
    assert not exists(tmp_path)
    theirs = tmp_path / "deepspeed" / "global_step5" / "mp_rank_00_model_states.pt"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(CheckpointError, match="of DeepSpeed's.*zero_to_fp32.py"):
        load(net, tmp_path / "deepspeed")
    shutil.rmtree(tmp_path / "deepspeed")
    for n in range(5):
        step(net)
        save(net, tmp_path, f"step-{n}", keep=4 if n == 4 else -1, extra={"n": n})
    assert complete(tmp_path, *(f"step-{n}" for n in range(1, 5))) and exists(tmp_path)
    assert (tmp_path / "latest").read_text() == "step-4\n"
    loaded = load(net, tmp_path)
    assert (loaded.tag, loaded.path) == ("step-4", tmp_path / "step-4")
    assert loaded.extra == {"n": 4} == read_extra(tmp_path)
    # what was given another name stays, and loads under that
    (tmp_path / "step-3").rename(tmp_path / "best")
    save(net, tmp_path, "step-5", keep=1)
    assert complete(tmp_path, "best", "step-5")
    assert load(net, tmp_path, "best").extra == {"n": 3}
    # what `latest` names stays, too
    for tag in ("x", "y"):
        save(net, tmp_path, tag, keep=1, latest=False)
    assert complete(tmp_path, "best", "step-5", "y")
    assert load(net, tmp_path).tag == "step-5"
    (tmp_path / "latest").unlink()
    assert load(net, tmp_path).tag == "y"  # the newest
    for text in ("q", "../y", "", "\udcff"):
        (tmp_path / "latest").write_bytes(os.fsencode(text))
        with pytest.raises(CheckpointError, match="latest.*complete are .*'y'"):
            load(net, tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint 'q'; complete are"):
        load(net, tmp_path, "q")


@pytest.mark.parametrize(
    "tag, extra, text",
    [
        ("a/b", {}, "the tag 'a/b' cannot name a folder"),
        ("latest", {}, "the tag 'latest' cannot"),
        ("a\rb", {}, "the tag 'a.*b' cannot"),
        ("latest.tmp", {}, "the tag 'latest.tmp' cannot"),
        ("a", {"f": [print]}, "extra holds a print"),
        ("a", {"net": nn.Linear(1, 1)}, r"extra holds a torch.nn.*state_dict\(\)"),
        ("a", {"loss": numpy.float64(1)}, r"extra holds a numpy.*item\(\)"),
    ],
)
def test_bad_arguments(tmp_path: Path, tag: str, extra: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(net_of(), tmp_path, tag, extra=extra)
    assert not names(tmp_path)


def test_a_step_that_is_not_complete_is_not_saved(tmp_path: Path) -> None:
    net = net_of(stage=1)
    net.backward(net(torch.rand(4, WIDTH)).sum())
    with pytest.raises(CheckpointError, match="gradients of a step that is not compl"):
        save(net, tmp_path, "a")
    net.step()
    save(net, tmp_path, "a")
    net.backward(net(torch.rand(4, WIDTH)).sum())
    load(net, tmp_path)  # which drops them
    assert float(net.clip_grad_norm(1.0)) == 0.0


@on_two_ranks
def test_a_net_that_not_all_ranks_train_is_refused(tmp_path: Path) -> None:
    save(net_of(), tmp_path, "a")
    net = net_of(group=comm.Groups(1).within)
    for call in (partial(save, tag="b"), load):
        with pytest.raises(CheckpointError, match="1 of 2 train this one"):
            call(net, tmp_path)
    assert not (tmp_path / "b").exists()


def test_values_come_back(tmp_path: Path) -> None:
    values: list[Any] = [None, 2**80, float("inf"), b"\x00\xff", (1, [2.5, {"a": {1}}])]
    values += [{1: "x", (2, 3): "ä"}, Counter({30: 2}), OrderedDict(b=1, a=2)]
    tensor = torch.ones(2, dtype=torch.bfloat16)
    save(net_of(), tmp_path, "a", extra={"values": values, "tensor": tensor})
    got = read_extra(tmp_path)
    assert got["values"] == values and torch.equal(got["tensor"], tensor)
    assert [type(v) for v in got["values"]] == [type(v) for v in values]


class Odd(nn.Module):
    """Names that a path or JSON would mind, and a state that is no tensor."""

    def __init__(self, tensor: bool = False) -> None:
        super().__init__()
        self.count, self.tensor = 0, tensor
        for n, name in enumerate(("a/b", "__metadata__", "0")):
            self.register_parameter(name, nn.Parameter(torch.full((2,), n + 1.0)))
            self.register_buffer(f"{name} buffer", torch.full((2,), 0.5j))
        self.register_buffer("gone", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p * x for p in self.parameters()]).sum()

    def get_extra_state(self) -> Any:
        kept = torch.tensor(self.count)
        return kept if self.tensor else {"count": kept}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state["count"] if isinstance(state, dict) else state)


def odd() -> DataParallel:
    module = nn.ModuleDict({"extra": Odd(tensor=True), "values/0": Odd()})
    groups = [{"params": [p], "lr": 0.1} for p in module.parameters()]
    return parallelize(module, torch.optim.SGD(groups, lr=0.1, momentum=0.9))


def test_odd_names_groups_and_modules(tmp_path: Path) -> None:
    net, other = odd(), odd()
    save(other, tmp_path, "no states")
    net.model["values/0"].count, net.model["extra"].count = 5, 7
    net.model["extra"].get_buffer("a/b buffer").fill_(7j)
    for n, group in enumerate(net.optimizer.param_groups):
        group.update(lr=0.1 / (1 + n), initial_lr=0.9, foreach=True)
    net.backward(net.model["extra"](torch.ones(2, device=device())))
    net.step()
    save(net, tmp_path, "a")
    load(other, tmp_path)
    assert same(state(net), state(other)) and other.model["values/0"].count == 5
    assert other.model["extra"].count == net.state_dict()["extra._extra_state"] == 7
    groups = zip(net.optimizer.param_groups, other.optimizer.param_groups, strict=True)
    for mine, its in groups:
        assert its["lr"] == mine["lr"] and its["initial_lr"] == 0.9
        assert not its["foreach"]  # how to compute is not saved
    load(net, tmp_path, "no states")
    assert not any("momentum" in key for key in state(net))
    net.model.register_buffer("z", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="buffers/z: .* no complex128"):
        save(net, tmp_path, "b")


# Damage


def damages(folder: Path) -> Iterator[str]:
    """Spoil the checkpoint in a folder, in turn in every way; the file's name."""
    index = folder / "a" / "index.json"
    [data] = folder.glob("a/rank-0001-*.safetensors")
    for path, parts in ((index, 5), (data, 9)):
        raw = path.read_bytes()
        header = int.from_bytes(raw[:8], "little") if path == data else 0
        at = [0, 4, 8, header, 8 + header, len(raw) - 1]
        for place in dict.fromkeys([*at, *range(0, len(raw), len(raw) // parts)]):
            for bit in (1, 128):
                spoilt = bytearray(raw)
                spoilt[place] ^= bit
                path.write_bytes(spoilt)
                yield path.name
        foreign = b"{}", b"not a file of ours", pickle.dumps({"a": 1}), raw + b"\n"
        for other in (raw[:0], raw[:7], raw[: len(raw) // 2], raw[:-1], *foreign):
            path.write_bytes(other)
            yield path.name
        path.unlink()
        yield path.name if path == data else "no checkpoint 'a'|no checkpoint in"
        path.mkdir()
        yield path.name
        path.rmdir()
        path.write_bytes(raw)


NETS: dict[str, DataParallel] = {}


def refused(folder: Path) -> tuple[str, bool]:
    """What a load says, and whether it has left everything as it was."""
    net = NETS.setdefault("net", net_of(stage=1))
    if not net.optimizer.state[net.flats[0].master]:
        step(net)
    before = state(net)
    with pytest.raises(CheckpointError) as error:
        load(net, folder, "a")
    return str(error.value), same(state(net), before)


def saved(folder: Path, tag: str) -> None:
    net = net_of(stage=2)
    step(net)
    save(net, folder, tag)


def test_damage_is_refused_by_name_on_all_ranks(two: Pool, tmp_path: Path) -> None:
    two.run(saved, tmp_path, "a")
    count = 0
    for name in damages(tmp_path):
        (text, untouched), other = two.run(refused, tmp_path)
        assert (text, untouched) == other and untouched
        assert re.search(name, text), (name, text)
        count += 1
    assert count > 50
    assert two.run(lambda folder: load(net_of(), folder).tag, tmp_path) == ["a", "a"]


# Nets that do not fit


def net_from(*layers: nn.Module, groups: int = 1, kind: str = "AdamW") -> Any:
    """A net in one unit; its first parameter may have a group of its own."""
    trained = [p for m in layers for p in m.parameters() if p.requires_grad]
    parts = [trained] if groups == 1 else [trained[:1], trained[1:]]
    optimizer = getattr(torch.optim, kind)([{"params": p} for p in parts], lr=0.1)
    return parallelize(nn.Sequential(*layers), optimizer, units=lambda m: False)


def layers(count: int, width: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count - 1)] + [nn.Linear(4, width)]


def changed(change: Callable[..., Any]) -> Callable[[], DataParallel]:
    def make() -> DataParallel:
        both = layers(2)
        change(*both)
        return net_from(*both)

    return make


def plain(count: int = 2, width: int = 4, **kind: Any) -> Callable[[], DataParallel]:
    return lambda: net_from(*layers(count, width), **kind)


frozen = changed(lambda first, last: last.requires_grad_(False))
tied = changed(lambda first, last: setattr(last, "weight", first.weight))
buffered = changed(lambda first, last: last.register_buffer("m", torch.ones(3)))
counted = changed(lambda first, last: last.register_buffer("m", torch.ones(3).char()))

# the net that was saved, the one that loads, and what is said
MISFITS: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (plain(), plain(width=3), r"'1.weight' is .*\(3, 4\) here and was.*4"),
    (plain(1), plain(29), "'10.bias'.* and 51 more: not in the checkpoint"),
    (plain(), plain(1), "'1.weight': not in the model"),
    (plain(kind="Adagrad"), plain(), "optimizer is AdamW here and was Adagrad"),
    (plain(groups=2), plain(), "'0.bias' is group 0 here and was group 1; .*groups"),
    (frozen, plain(), "'1.weight' is group 0 here and was frozen"),
    (plain(), tied, r"'0.weight', '1.weight'\] are one parameter here"),
    (buffered, plain(), "buffer '1.m': not in the model"),
    (counted, buffered, "buffer '1.m' is float .* here and was int8"),
]


@pytest.mark.parametrize("make, other, text", MISFITS)
def test_a_net_that_does_not_fit(
    tmp_path: Path, make: Any, other: Any, text: str
) -> None:
    save(make(), tmp_path, "a")
    net = other()
    before = state(net)
    with pytest.raises(CheckpointError, match=f"'a' does not fit: .*{text}") as error:
        load(net, tmp_path)
    assert same(state(net), before) and len(str(error.value)) < 500


def test_a_part_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    source, net = plain()(), plain(3)()
    for made in (source, net):
        made.optimizer.param_groups[0]["lr"] = 7.0 / made.flats[0].size
        made.backward(made(torch.rand(2, 4)).sum())
        made.step()
    save(source, tmp_path, "a")
    before, own = state(net), net.state_dict()
    load(net, tmp_path, strict=False, optimizer=False)
    there, here, after = source.state_dict(), net.state_dict(), state(net)
    assert all(torch.equal(here[k], there.get(k, own[k])) for k in here)
    for key in ("0 exp_avg", "0 step", "random"):
        assert torch.equal(after[key], before[key])
    assert net.optimizer.param_groups[0]["lr"] == 7.0 / net.flats[0].size
    # what was frozen has weights, and no optimizer state
    save(frozen(), tmp_path, "b")
    load(plain()(), tmp_path, optimizer=False)


# In the background


def behind(folder: Path) -> tuple[bool, bool, list[str]]:
    """Steps while rank 1 holds a save up; what is saved; the next save waits for it."""
    net = net_of(stage=1)
    step(net)
    before, order, write = state(net), [], MODULE.write_tensors
    opened, reached = threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        reached.set()
        assert rank() == 0 or opened.wait(60)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "write_tensors", held)
        save(net, folder, "a", background=True)
        assert reached.wait(60)
        for how in comm.ALGORITHMS:  # the backend's ranks compare what they called
            with comm.algorithm(how):
                step(net)
        unfinished = not exists(folder)
        opened.set()
        save(net, folder, "b", background=True)
        for _ in range(3):  # once more does nothing
            order.append((folder / "latest").read_text().strip())
            finish()
    load(net, folder, "a")
    return unfinished, same(state(net), before), order


def test_steps_go_on_while_files_are_written(two: Pool, tmp_path: Path) -> None:
    for unfinished, equal, order in two.run(behind, tmp_path):
        assert unfinished and equal and order[0] in "ab" and order[2] == "b"
    assert complete(tmp_path, "a", "b", ranks=2)


def failing(folder: Path, how: str) -> list[str]:
    """Rank 1's disk is full in one save; what is said, and when."""
    net = net_of(stage=2)
    step(net)
    # each rank may put its time into the tag: rank 0's is taken
    save(net, folder, "good" if rank() == 0 else "later")

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
        if rank() == 1:
            patch.setattr(os, "write", full)
        save(net, folder, "bad", background=how != "now")
        if how == "finish":
            finish()
        elif how == "next save":
            save(net, folder, "next")
    found = load(net, folder).tag
    save(net, folder, "next")  # the error is raised once
    return [str(error.value), found, load(net, folder).tag]


@pytest.mark.parametrize("how", ["now", "finish", "next save"])
def test_a_full_disk_of_one_rank(two: Pool, tmp_path: Path, how: str) -> None:
    first, other = two.run(failing, tmp_path, how)
    assert first == other and first[1:] == ["good", "next"]
    assert re.search(r"bad/rank-0001-.*: No space left", first[0])
    assert complete(tmp_path, "good", "next", ranks=2)


@pytest.mark.thorough
def test_kills_at_every_moment(tmp_path: Path, tool: Callable[..., str]) -> None:
    """Of one rank or of all, in a step, in a save or beside one; see kills.py."""
    kills = json.loads(tool("python", Path(__file__).with_name("kills.py"), tmp_path))
    assert all(kills) and sum(kills) > 150
