"""A save counts or it does not; what is damaged is refused; nothing is executed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import gc
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import threading
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from minizero import Plan, parallelize
from minizero.checkpoint import commit, writer
from minizero.checkpoint.api import load, save
from minizero.checkpoint.directory import checkpoints, exists, read_index
from minizero.checkpoint.encoding import DTYPES, decode, encode
from minizero.checkpoint.manifest import Index, index_text, parse_index, sealed
from minizero.checkpoint.tensor_file import (
    CheckpointError,
    LazyTensor,
    TensorFile,
    TensorWriter,
    seal,
)
from minizero.checkpoint.writer import Saving
from minizero.precision import MixedPrecision
from minizero.ranks.launch import Pool, RankError, rank
from minizero.zero.data_parallel import DataParallel

WIDTH = 6


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def net_of(module: nn.Module | None = None, stage: int = 3) -> DataParallel:
    module = model() if module is None else module
    return parallelize(
        module, torch.optim.AdamW(module.parameters()), Plan.stage(stage)
    )


def step(net: DataParallel) -> None:
    net.backward(net(torch.rand(4, WIDTH)).square().sum())
    net.step()


def state(net: DataParallel) -> dict[str, Tensor]:
    """All that a load can change, copied."""
    found = {f"buffer {k}": b for k, b in net.model.named_buffers()}
    for unit in net.units:
        for number, flat in enumerate(unit.flats):
            for owned in net.owned_states(flat):
                key = f"{unit.name} {number} {owned.index}"
                found[key] = owned.master
                found |= {f"{key} {k}": v for k, v in owned.state.items()}
    found["random"] = torch.get_rng_state()
    return {k: v.clone() for k, v in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def complete(folder: Path, *tags: str, ranks: int = 1) -> bool:
    """Whether a folder has these checkpoints, `latest`, and nothing else."""
    found = names(folder)
    if {p.name for p in folder.iterdir() if p.is_dir()} != {*tags}:
        return False  # an empty one was left
    expected = 1 + sum(1 + ranks for _ in tags)
    indexes = {f"{tag}/index.json" for tag in tags}
    return len(found) == expected and {"latest", *indexes} <= set(found)


def values_of(path: Path) -> tuple[list[str], bytes]:
    """What a file holds, but for the seal in its header."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    return [*json.loads(raw[8:begin])][1:], raw[begin:]


def data_file(folder: Path, tag: str, r: int = 0) -> Path:
    [path] = (folder / tag).glob(f"rank-{r:04d}-*.safetensors")
    return path


# The commit: a process that ends at any step of it leaves a whole checkpoint


class Killed(BaseException):
    """No handler of the code under test may see it as an error."""


class Death:
    """Lets so many file operations happen, and none after that.

    As with a process that was killed, what handlers try afterwards does not happen
    either. A write that is the last one is done in half.
    """

    NAMES = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        for name in self.NAMES:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0 and name == "write":
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
            if self.left <= 0:
                self.left = -1
                raise Killed
            self.left -= 1
            if name == "write":  # many short writes: more places to end at
                return original(args[0], bytes(args[1])[:2048])
            return original(*args, **kwargs)

        return wrapped


def died(net: DataParallel, folder: Path, tag: str, after: int, keep: int) -> bool:
    """Save, and end after so many operations; whether it came to that."""
    with pytest.MonkeyPatch.context() as patch:
        Death(patch, after)
        try:
            save(net, folder, tag, keep=keep)
        except Killed:
            return True
        finally:
            commit.busy.clear()  # of a process that is no more
            patch.undo()
    return False


@pytest.mark.parametrize(
    "tag, keep", [("b", 9), ("a", 9), ("b", 1)], ids=["new", "same tag", "last"]
)
def test_a_kill_at_any_step(tmp_path: Path, tag: str, keep: int) -> None:
    net = net_of()
    step(net)
    old = state(net)
    template = tmp_path / "template"
    save(net, template, "a")
    step(net)
    torch.manual_seed(5)
    new, found, after = state(net), set(), 0
    folder = tmp_path / "run"
    while True:
        shutil.copytree(template, folder)
        ended = not died(net, folder, tag, after, keep)
        other = net_of()
        load(other, folder)
        which = "new" if same(state(other), new) else "old"
        assert same(state(other), new if which == "new" else old), after
        found.add(which)
        # the next save, of a process that starts again, leaves nothing behind
        torch.manual_seed(5)
        save(net, folder, tag, keep=keep)
        both = {"a", tag} if keep > 1 else {tag}
        assert complete(folder, *both), names(folder)
        load(other, folder)
        assert same(state(other), new)
        shutil.rmtree(folder)
        if ended:
            break
        after += 1
    assert found == {"old", "new"} and after > 20


def test_a_kill_of_the_first_save(tmp_path: Path) -> None:
    """What it leaves is gone after another save, a folder without files too."""
    net, after = net_of(), 0
    folder = tmp_path / "run"
    while died(net, folder, "a", after, 1):
        if not (folder / "a" / "index.json").exists():
            assert not exists(folder)
            with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
                load(net, folder)
        else:
            load(net, folder)
        save(net, folder, "b", keep=1)
        assert complete(folder, "b"), after
        shutil.rmtree(folder)
        after += 1
    assert complete(folder, "a") and after > 10


def test_strays_are_swept_and_nothing_else(tmp_path: Path) -> None:
    net = net_of()
    save(net, tmp_path, "a")
    ours = [
        "a.tmp-0123abcd/rank-0000-of-0002.safetensors",
        "a.tmp-0123abcd/index.json.tmp",
        "a.old-0123abcd/index.json",
        "gone.tmp-4567abcd/rank-0001-of-0002.json.tmp",
        "latest.tmp-0123abcd",
    ]
    theirs = [
        "a/notes.txt",
        "other/rank.safetensors",
        "b/index.json",
        "notes.tmp",
        "b/rank-0000-of-0001.safetensors",
        "c.tmp-0123abcd/notes.txt",
    ]
    for name in ours + theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("mine", "empty.tmp-0123abcd"):
        (tmp_path / name).mkdir()
    save(net, tmp_path, "c")
    assert not {*ours} & {*names(tmp_path)} and {*theirs} <= {*names(tmp_path)}
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"a", "b", "c", "c.tmp-0123abcd", "mine", "other"}


# Finding, and what is kept


def test_the_last_are_kept(tmp_path: Path) -> None:
    net = net_of()
    for n in range(5):
        step(net)
        save(net, tmp_path, f"step-{n}", keep=2)
    assert complete(tmp_path, "step-3", "step-4")
    assert load(net, tmp_path).tag == "step-4"
    assert load(net, tmp_path, "step-3").path == tmp_path / "step-3"
    # what was given another name is kept, and loads under that
    (tmp_path / "step-3").rename(tmp_path / "best")
    save(net, tmp_path, "step-5", keep=1)
    assert complete(tmp_path, "best", "step-5")
    assert load(net, tmp_path, "best").tag == "best"


def test_what_is_linked_is_kept(tmp_path: Path) -> None:
    """By a link to a checkpoint, by `latest`, even if it is one; in a linked folder."""
    folder, net = tmp_path / "link", net_of()
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    for tag in "abcd":
        save(net, folder, tag)
        if tag == "a":
            (folder / "best").symlink_to("a")
        if tag == "b":
            (folder / "latest").write_text("b\n")
            save(net, folder, "x", latest=False, keep=1)
            assert {"a", "b", "x"} <= {tag for tag, _ in checkpoints(folder)}
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("c")
    save(net, folder, "e", keep=1, latest=False)
    assert [tag for tag, _ in checkpoints(folder)] == ["a", "best", "c", "latest", "e"]
    assert load(net, folder, "best").tag == "best"
    save(net, folder, "f", keep=1)
    assert load(net, folder).tag == "f"


def test_a_latest_that_no_text_is(tmp_path: Path) -> None:
    net = net_of()
    save(net, tmp_path, "a")
    (tmp_path / "latest").write_bytes(b"\xff")
    save(net, tmp_path, "b", latest=False, keep=1)
    assert [tag for tag, _ in checkpoints(tmp_path)] == ["b"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    save(net, tmp_path, "c", latest=False, keep=1)
    with pytest.raises(CheckpointError, match="latest: this is a folder"):
        save(net, tmp_path, "d")
    assert load(net, tmp_path, "d").tag == "d"


def test_a_save_that_is_not_the_latest(tmp_path: Path) -> None:
    net = net_of()
    save(net, tmp_path, "a")
    save(net, tmp_path, "b", latest=False, keep=1)
    assert load(net, tmp_path).tag == "a" and complete(tmp_path, "a", "b")
    (tmp_path / "latest").unlink()
    assert load(net, tmp_path).tag == "b"  # the newest


def test_latest_that_is_wrong(tmp_path: Path) -> None:
    net = net_of()
    assert not exists(tmp_path)
    save(net, tmp_path, "z")
    save(net, tmp_path, "a")
    assert exists(tmp_path)
    for text in ("q", "../z", "", "a/../z"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="latest: it names .* 'z', 'a', old"):
            load(net, tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="latest: it cannot be read"):
        load(net, tmp_path)
    with pytest.raises(
        CheckpointError, match="index.json: there is no such .* 'z', 'a'"
    ):
        load(net, tmp_path, "q")
    assert load(net, tmp_path, "z").tag == "z"


def test_latest_that_was_cut_or_changed(tmp_path: Path) -> None:
    """None of its beginnings is another checkpoint's name; scripts can read it."""
    net = net_of()
    for tag in ("step-1", "step-10"):
        save(net, tmp_path, tag)
    path = tmp_path / "latest"
    line = path.read_bytes()
    assert line.decode().strip() == "step-10" and line.count(b"\n") == 1
    for length in range(len(line)):
        path.write_bytes(line[:length])
        with pytest.raises(CheckpointError, match="latest: it names"):
            load(net, tmp_path)
    path.write_bytes(line.replace(b"step-10", b"step-1"))
    with pytest.raises(
        CheckpointError, match="names 'step-1' .* it was cut or changed"
    ):
        load(net, tmp_path)
    path.write_text("step-1\n")  # by hand
    assert load(net, tmp_path).tag == "step-1"


@pytest.mark.parametrize(
    "options, text",
    [
        ({"tag": "a/b"}, "the tag 'a/b' cannot name a folder"),
        ({"tag": ".."}, "the tag '..' cannot"),
        ({"tag": "latest"}, "the tag 'latest' cannot"),
        ({"tag": ""}, "the tag '' cannot"),
        ({"tag": 5}, "the tag 5 cannot"),
        ({"tag": "Latest"}, "the tag 'Latest' cannot"),
        ({"tag": "a\rb"}, "the tag 'a.*b' cannot"),
        ({"tag": "\ud800"}, "the tag '.*' cannot"),
        ({"tag": "ä" * 101}, "the tag 'ä*' cannot"),
        ({"tag": "a.tmp-0123abcd"}, "the tag 'a.tmp-0123abcd' cannot"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": "2"}, "keep must be at least 1, or None for all, not '2'"),
        ({"keep": 1.5}, "keep must be at least 1"),
        ({"background": -1}, "background is a number of bytes"),
        ({"background": "1GB"}, "background is a number of bytes"),
        (
            {"extra": {"f": [print]}},
            r"extra\['f'\]\[0\] is a builtins.builtin_function",
        ),
        (
            {"own": {"loop": nn.Linear(1, 1)}},
            r"own\['loop'\] is a torch.nn.*state_dict",
        ),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(net_of(), tmp_path, **{"tag": "a", **options})
    assert not names(tmp_path)


def test_tags_that_are_no_names(tmp_path: Path) -> None:
    """Another folder's index would come with this folder's files."""
    for name in ("here", "there"):
        save(net_of(), tmp_path / name, "a")
    for tag in ("../there/a", str(tmp_path / "there" / "a"), "", "a/", "..", 5):
        with pytest.raises(CheckpointError, match="is no name of a folder .* has 'a'"):
            load(net_of(), tmp_path / "here", tag)  # type: ignore[arg-type]
    for tag in ("ä ☃ 'quoted' $x", ".hidden", "x" * 200):
        assert save(net_of(), tmp_path / "here", tag).path.name == tag
        assert load(net_of(), tmp_path / "here").tag == tag


def in_a_step(
    folder: Path, stage: int, synced: str, load_it: bool
) -> dict[str, Tensor]:
    """Two steps of three micro-batches; saved, or loaded, in the second one."""
    torch.manual_seed(1)
    data, net = torch.rand(7, 4, WIDTH), net_of(stage=stage)
    for n, reduces in zip((0, 1, 2, 3, 4, 5), synced * 2, strict=True):
        if n == 5 and load_it:
            net.backward(net(data[6]).sum())  # which is forgotten
            load(net, folder)
        elif n == 5:
            saving = save(net, folder, "a", background=1 << 20)
        with net.no_sync() if reduces == "-" else contextlib.nullcontext():
            net.backward(net(data[n] * (1 + rank())).square().sum())
        if n % 3 == 2:
            net.step()
    if not load_it:
        saving.wait()
    return state(net)


def test_a_save_in_the_middle_of_a_step(two: Pool, tmp_path: Path) -> None:
    """Gradients so far are saved, reduced or not: the resumed run is the same."""
    for stage, synced in ((0, "--+"), (1, "--+"), (1, "+++"), (1, "+-+"), (2, "+++")):
        folder = tmp_path / f"{stage}{synced}"
        runs = two.run(in_a_step, folder, stage, synced, False)
        again = two.run(in_a_step, folder, stage, synced, True)
        assert all(map(same, runs, again)), (stage, synced)
    # what was not reduced becomes what its reduction would have made
    nets = two.run(resharded, tmp_path / "0--+", 3)
    [alone] = [resharded(tmp_path / "0--+", 1)]
    for key in alone:
        torch.testing.assert_close(
            torch.cat([n[key] for n in nets])[: len(alone[key])], alone[key]
        )


def test_a_save_between_clipping_and_step(tmp_path: Path) -> None:
    """In 16 bit, clipping is only a factor until the update."""
    module = model()
    optimizer, half = torch.optim.AdamW(module.parameters()), MixedPrecision()
    net = parallelize(module, optimizer, Plan.stage(1), precision=half)
    net.backward(net(torch.rand(4, WIDTH)).square().sum())
    net.clip_grad_norm(0.1)
    with pytest.raises(CheckpointError, match="clip_grad_norm was called"):
        save(net, tmp_path, "a")
    net.step()
    save(net, tmp_path, "a")


def resharded(folder: Path, stage: int) -> dict[str, Tensor]:
    net = net_of(stage=stage)
    assert load(net, folder).gradients and net.has_gradients
    net.grad_norm()  # joins what was set aside
    grads = {}
    for unit in net.units:
        for number, flat in enumerate(unit.trainable):
            grads[f"{unit.name} {number}"] = torch.cat(net.owned_grads(flat))
            assert grads[f"{unit.name} {number}"].any()
    assert not load(net, folder, optimizer=False).gradients
    assert not net.has_gradients
    return grads


# Damage


def damages(folder: Path) -> Iterator[tuple[str, str]]:
    """Spoils the checkpoint in a folder, in turn in every way; what it is called."""
    index, data = folder / "a" / "index.json", data_file(folder, "a", 1)
    for path, parts in ((index, 5), (data, 9)):
        raw = path.read_bytes()
        header = int.from_bytes(raw[:8], "little") if path == data else 0
        places = [0, 4, 8, header, 8 + header, len(raw) // 2, len(raw) - 1]
        for place in dict.fromkeys([*places, *range(0, len(raw), len(raw) // parts)]):
            for bit in (1, 128):
                spoilt = bytearray(raw)
                spoilt[place] ^= bit
                path.write_bytes(spoilt)
                yield path.name, "checksum"
        for length in (0, 7, len(raw) // 2, len(raw) - 1):
            path.write_bytes(raw[:length])
            yield path.name, "truncated"
        path.write_bytes(raw + b"\n")
        yield path.name, "checksum|bytes"
        for foreign in (b"{}", b"not a file of ours", pickle.dumps({"a": 1})):
            path.write_bytes(foreign)
            yield path.name, "checksum|bytes"
        path.unlink()
        yield path.name, "no such|there is no"
        path.mkdir()
        yield path.name, "folder"
        path.rmdir()
        path.write_bytes(raw)


def refused(folder: Path) -> tuple[str, bool]:
    """What a load says, and whether it has left everything as it was."""
    net = NETS.setdefault("net", net_of(stage=1))
    if not net.optimizer.state:
        step(net)
    before = state(net)
    with pytest.raises(CheckpointError) as error:
        load(net, folder)
    return str(error.value), same(state(net), before)


NETS: dict[str, DataParallel] = {}


def saved(folder: Path, tag: str, **options: Any) -> None:
    net = net_of(stage=2)
    step(net)
    save(net, folder, tag, **options)


def test_damage_is_refused_by_name_on_all_ranks(two: Pool, tmp_path: Path) -> None:
    two.run(saved, tmp_path, "a")
    count = 0
    for name, why in damages(tmp_path):
        results = two.run(refused, tmp_path)
        texts = {text for text, _ in results}
        assert len(texts) == 1 and all(untouched for _, untouched in results)
        [text] = texts
        assert name in text and any(w in text for w in why.split("|")), (why, text)
        count += 1
    assert count > 60
    assert two.run(lambda folder: load(net_of(), folder).tag, tmp_path) == ["a", "a"]


def reheaded(path: Path, change: Callable[[dict[str, Any]], Any], owner: str) -> None:
    """Another header in a tensor file; sealed, if there is an owner to seal it for."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    about = header.pop("__metadata__")
    change(header)
    if owner:
        about = {"seal": seal(header, owner)}
    text = json.dumps({"__metadata__": about, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rewritten(
    folder: Path, change: Callable[[dict[str, Any]], Any], believed: bool = True
) -> None:
    """Another index with a good checksum, as another program might write it.

    If it is to be `believed`, the data files are sealed for that index.
    """
    path = folder / "a" / "index.json"
    facts = json.loads(path.read_text())
    del facts["seal"]
    change(facts)
    path.write_bytes(sealed(facts))
    if believed:
        with contextlib.suppress(CheckpointError):
            index = parse_index(path.read_bytes(), path)
            for file in index.files:
                owner = f"{file.name} {index.said()}"
                reheaded(path.parent / file.name, lambda header: None, owner)
            with_good_checksums(folder)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda f: f.update(version=3), "index.json: it is of version 3, and"),
    "foreign": (lambda f: f.update(format="x"), "index.json: its format is 'x'"),
    "nothing": (lambda f: f.clear(), "index.json: this is no JSON"),
    "nameless": (lambda f: f.pop("format"), "index.json: its format is None"),
    "less": (lambda f: f.pop("flats"), "index.json: the index does not make sense"),
    "more": (lambda f: f.update(code="x"), "does not make sense .*'code'"),
    "types": (lambda f: f.update(flats=7), "the index does not make sense"),
    "ranks": (lambda f: f.update(world_size=3), "1 files of 3 ranks"),
    "path": (
        lambda f: f["files"][0].update(name="../../etc/passwd"),
        "a file called '../../etc/passwd'",
    ),
    "shape": (
        lambda f: f["flats"][0]["slots"][0].update(shape=[2, 3]),
        "no such buffer",
    ),
    "tensor": (
        lambda f: f["flats"][0].update(unit="elsewhere"),
        r"rank-0000.* it has no tensor 'elsewhere/0/",
    ),
    "integers": (
        lambda f: f["flats"][0].update(dtype="int32"),
        r"rank-0000.* it has no tensor '0/0/parameters' of int32",
    ),
    "state": (
        lambda f: f["flats"][0]["states"].pop("exp_avg"),
        "optimizer's states of '0.weight' lack exp_avg",
    ),
    "further state": (
        lambda f: f["flats"][0]["states"].update(more="float32"),
        "it has no tensor '0/0/optimizer/more' of float32",
    ),
    "scalar": (
        lambda f: f["flats"][0]["scalars"].update(step="x"),
        "optimizer's states of '0.weight': 'step' is 'x', which is no number",
    ),
    "option": (
        lambda f: f["groups"][0].update(lr="x"),
        "option 'lr' of group 0 is 'x', which is no number",
    ),
    "options": (
        lambda f: f["groups"][0].update(betas=3),
        "a saved value does not make sense",
    ),
    "parameters": (
        lambda f: f["groups"][0].update(params=[]),
        "group 0 of the optimizer has no options",
    ),
    "precision": (
        lambda f: f["precision"].update(skipped_steps="x"),
        "the precision's state is {'skipped_steps': 'x'}",
    ),
    "value": (lambda f: f.update(extra={"$pickle": "x"}), "does not make sense"),
    "number": (lambda f: f.update(number="x"), "make sense .'number': Input should"),
    "tied": (lambda f: f.update(tied={"a": "b"}), "'a' is tied to 'b': no such"),
    "twice": (
        lambda f: f["flats"].append(f["flats"][0]),
        "2 tensors of the name '0.weight'",
    ),
    "buffer": (
        lambda f: f["buffers"].update(x={"dtype": "text", "shape": [1]}),
        "'buffers/x' of dtype 'text'",
    ),
    "no buffer": (
        lambda f: f["buffers"].update(x={"dtype": "int8", "shape": [1]}),
        r"rank-0000.* it has no tensor 'buffers/x' of int8, \[1\]",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_is_not_ours(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "a")
    rewritten(tmp_path, CHANGES[change][0])
    net = net_of()
    before = state(net)
    with pytest.raises(CheckpointError, match=CHANGES[change][1]):
        load(net, tmp_path)
    assert same(state(net), before)


@pytest.mark.parametrize("renamed", [False, True])
def test_one_file_for_two_ranks(two: Pool, tmp_path: Path, renamed: bool) -> None:
    """Named twice; or copied, under the other's name, with its checksum."""
    two.run(saved, tmp_path, "a")
    first, second = (data_file(tmp_path, "a", r) for r in (0, 1))
    named = second.name if renamed else first.name

    def change(facts: dict[str, Any]) -> None:
        one, other = facts["files"]
        other.update(one | ({"name": other["name"]} if renamed else {}))

    if renamed:
        shutil.copy(first, second)
    rewritten(tmp_path, change, believed=False)
    net = net_of()
    before = state(net)
    with pytest.raises(CheckpointError, match=named):
        load(net, tmp_path)
    assert same(state(net), before)


# Forgeries: what has good checksums and is not what was saved


def drawn_change(tree: Any, dice: random.Random) -> None:
    """Change one thing somewhere in a tree."""
    while True:
        keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
        if not keys:
            break
        key = dice.choice(keys)
        value = tree[key]
        if isinstance(value, dict | list) and value and dice.random() < 0.85:
            tree = value
            continue
        other = dice.choice(keys)
        how = dice.randrange(6)
        if how == 0:
            del tree[key]
        elif how == 1:
            tree[key], tree[other] = tree[other], tree[key]
        elif how == 2:
            tree[key] = tree[other]
        elif how == 3 and isinstance(value, int | float):
            tree[key] = dice.choice([value + 1, -value, value * 2, 0, 2**70])
        elif how == 4 and isinstance(value, str):
            tree[key] = dice.choice(["int32", "I32", "BF16", "float32", value[:-1], ""])
        else:
            values: list[Any] = [None, True, -1, 1.5, "x", [], {}, [[]], 10**30]
            tree[key] = dice.choice(values)
        return
    if isinstance(tree, dict):
        tree["more"] = 1
    else:
        tree.append(1)


def all_there_is(net: DataParallel, extra: Any = None) -> str:
    """Every value that a load may change, in words."""
    groups = [{**group, "params": 0} for group in net.optimizer.param_groups]
    precision = net.precision.state_dict()
    tensors = {k: v.tolist() for k, v in state(net).items()}
    counts = net.model[2].count, net.has_gradients
    return repr((groups, precision, tensors, counts, extra))


def forgeable(seed: int) -> DataParallel:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counting())
    module[2].weight.requires_grad_(False)
    first, *others = (p for p in module.parameters() if p.requires_grad)
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.5}]
    net = parallelize(module, torch.optim.AdamW(groups, lr=0.1 + seed), Plan.stage(1))
    for _ in range(1 + seed):
        net.backward(net.model[1](net.model[0](torch.rand(4, WIDTH))).square().sum())
        net.step()
    module[2].count = seed
    return net


@pytest.mark.parametrize("believed", [False, True], ids=["resealed", "rewritten"])
def test_forgeries(tmp_path: Path, believed: bool) -> None:
    """Refused with the net untouched, or the very same values; and none hangs.

    What is `believed` has all seals anew, as only this library makes them; then it may
    be other values too, but never half of them.
    """
    saver, net, dice = forgeable(1), forgeable(0), random.Random(believed)
    save(saver, tmp_path / "good", "a", extra={"step": 7, "losses": torch.ones(3)})
    saved_ones = load(saver, tmp_path / "good").extra
    expected, torch_state = all_there_is(saver, saved_ones), torch.get_rng_state()
    before, refusals, bad = all_there_is(net), 0, tmp_path / "bad"
    for n in range(200):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(tmp_path / "good", bad)
        if n % 3:
            rewritten(bad, lambda facts: drawn_change(facts, dice), believed)
        else:
            path = data_file(bad, "a")
            index = parse_index(*read_index(bad, "a"))
            owner = f"{path.name} {index.said()}" if believed else ""
            reheaded(path, lambda header: drawn_change(header, dice), owner)
            with_good_checksums(bad)
        try:
            extra = load(net, bad).extra
        except CheckpointError:
            refusals += 1
        else:
            assert believed or all_there_is(net, extra) == expected, n
            net, _ = forgeable(0), torch.set_rng_state(torch_state)
            continue
        assert all_there_is(net) == before, n
    assert refusals > 100


@pytest.mark.parametrize("name", ["latest", "a/index.json", "data"])
def test_files_without_an_end(tmp_path: Path, name: str) -> None:
    saved(tmp_path, "a")
    place = data_file(tmp_path, "a") if name == "data" else tmp_path / name
    place.unlink()
    net = net_of()
    for make in (lambda: place.symlink_to("/dev/zero"), lambda: os.mkfifo(place)):
        make()
        with pytest.raises(
            CheckpointError, match=f"{place.name}.*: .*device or a pipe"
        ):
            load(net, tmp_path)
        save(net, tmp_path, "b", keep=9, latest=False)  # looks at what there is
        place.unlink()


def small(*widths: int, groups: int = 1, kind: str = "AdamW", **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
    module = nn.Sequential(*layers)
    params = list(module.parameters())
    if groups == 2:
        params = [{"params": params[:1]}, {"params": params[1:]}]  # type: ignore[list-item]
    return parallelize(module, getattr(torch.optim, kind)(params, lr=0.1), **options)


def frozen() -> DataParallel:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    return parallelize(module, torch.optim.AdamW(trained, lr=0.1))


def tied() -> DataParallel:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return parallelize(
        module, torch.optim.AdamW(module.parameters(), lr=0.1), units=lambda m: False
    )


def buffered() -> DataParallel:
    net = small(4, 4, 4)
    net.model.register_buffer("mean", torch.ones(3))
    return net


def counted(dtype: torch.dtype) -> DataParallel:
    net = small(4, 4)
    net.model.register_buffer("count", torch.ones(3, dtype=dtype))
    net.model[0].register_parameter(
        "table", nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    )
    trained = [p for p in net.model.parameters() if p.requires_grad]
    return parallelize(net.model, torch.optim.AdamW(trained, lr=0.1))


MISFITS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "shape": (
        lambda: small(4, 4, 4),
        lambda: small(4, 4, 3),
        r"'1.weight' has shape \(3, 4\) here and \(4, 4\)",
    ),
    "missing": (
        lambda: small(4, 4),
        lambda: small(4, 4, 4),
        "'1.bias' is not in the checkpoint; parameter '1.weight' is not",
    ),
    "further": (
        lambda: small(4, 4, 4),
        lambda: small(4, 4),
        "parameter '1.bias' of the checkpoint is not in the model",
    ),
    "optimizer": (
        lambda: small(4, 4, kind="Adagrad"),
        lambda: small(4, 4),
        "the optimizer is AdamW here and was Adagrad",
    ),
    "groups": (
        lambda: small(4, 4, groups=2),
        lambda: small(4, 4),
        "the optimizer has 1 groups here and had 2; .*'0.bias' is in group 0",
    ),
    "thawed": (frozen, lambda: small(4, 4, 4), "'1.weight' is trained here and was fr"),
    "tied": (lambda: small(4, 4, 4), tied, "'0.weight' and '1.weight' are one param"),
    "buffer": (buffered, lambda: small(4, 4, 4), "buffer 'mean' of the checkpoint is"),
    "numbers": (
        lambda: counted(torch.int8),
        lambda: counted(torch.float32),
        "'0.table' is float32 here and int8 in.*'count' is float32 here and int8",
    ),
    "no buffer": (lambda: small(4, 4, 4), buffered, "buffer 'mean' is not in the che"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_net_that_does_not_fit(tmp_path: Path, misfit: str) -> None:
    make, other, text = MISFITS[misfit]
    save(make(), tmp_path, "a")
    net = other()
    before = state(net)
    with pytest.raises(
        CheckpointError, match=f"a: this checkpoint does not fit.*{text}"
    ):
        load(net, tmp_path)
    assert same(state(net), before)


def test_many_misfits_are_summed_up(tmp_path: Path) -> None:
    save(small(4, 4), tmp_path, "a")
    with pytest.raises(CheckpointError, match="the same of 51 more") as error:
        load(small(*[4] * 30), tmp_path)
    assert len(str(error.value)) < 1000


def test_what_fits_is_loaded_if_names_may_differ(tmp_path: Path) -> None:
    source, net = small(4, 4, 4), small(4, 4, 4, 4)
    for made in (source, net):
        made.backward(made(torch.rand(2, 4)).sum() * (1 + len(made.units)))
        made.step()
    save(source, tmp_path, "a")
    own = net.state_dict()
    load(net, tmp_path, strict=False)
    there, here = source.state_dict(), net.state_dict()
    assert all(torch.equal(here[k], there.get(k, own[k])) for k in here)
    load(net, tmp_path, strict=False, optimizer=False)
    # a saved run that was frozen has weights, and no optimizer state
    save(frozen(), tmp_path, "b")
    load(small(4, 4, 4), tmp_path, optimizer=False)


def test_weights_alone(tmp_path: Path) -> None:
    net = net_of()
    step(net)
    save(net, tmp_path, "a", extra={"n": 1})
    other = net_of(model(1))
    step(other)
    before = state(other)
    net.optimizer.param_groups[0]["lr"] = 7.0
    assert load(other, tmp_path, optimizer=False).extra == {"n": 1}
    after = state(other)
    assert torch.equal(after["0 0 0"], state(net)["0 0 0"])
    for name in ("0 0 0 exp_avg", "0 0 0 step", "random"):
        assert torch.equal(after[name], before[name])
    assert other.optimizer.param_groups[0]["lr"] != 7.0


def test_options_of_groups_come_back_but_how_to_compute_does_not(
    tmp_path: Path,
) -> None:
    net = small(4, 4)
    group = net.optimizer.param_groups[0]
    group.update(lr=0.3, betas=(0.5, 0.6), fused=True, initial_lr=0.9)
    save(net, tmp_path, "a")
    other = small(4, 4)
    tensor = torch.tensor(0.1)
    other.optimizer.param_groups[0].update(lr=tensor, capturable=False)
    load(other, tmp_path)
    got = other.optimizer.param_groups[0]
    assert got["lr"] is tensor and float(tensor) == pytest.approx(0.3)
    assert got["betas"] == (0.5, 0.6) and got["initial_lr"] == 0.9
    assert not got["fused"] and len(got["params"]) == 1


# Nothing in a file is executed


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def with_good_checksums(folder: Path) -> None:
    """As somebody who wants the files to be believed."""
    path = folder / "a" / "index.json"
    index = parse_index(path.read_bytes(), path)
    for file in index.files:
        raw = (path.parent / file.name).read_bytes()
        file.bytes, file.crc32 = len(raw), zlib.crc32(raw)
    path.write_bytes(index_text(index))


@pytest.mark.parametrize("torch_s", [False, True], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["latest", "a/index.json", "data", "trusted data"])
def test_a_pickle_is_not_executed(tmp_path: Path, name: str, torch_s: bool) -> None:
    saved(tmp_path, "a")
    touched = tmp_path / "touched"
    place = data_file(tmp_path, "a") if "data" in name else tmp_path / name
    if torch_s:
        torch.save({"a": Payload(touched)}, place)
    else:
        place.write_bytes(pickle.dumps(Payload(touched)))
    if name == "trusted data":
        with_good_checksums(tmp_path)
    with pytest.raises(CheckpointError, match=place.name):
        load(net_of(), tmp_path)
    assert not touched.exists()
    with place.open("rb") as file:  # it would have
        if torch_s:
            torch.load(file, weights_only=False)
        else:
            pickle.load(file)
    assert touched.exists()


def test_no_module_can_unpickle(root: Path) -> None:
    folder = root / "minizero" / "checkpoint"
    for path in (*folder.glob("*.py"), folder.parent / "comm" / "agreement.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                assert not {"pickle", "marshal", "shelve"} & set(text.split()), text
            if isinstance(node, ast.Attribute | ast.Name):
                assert ast.unparse(node) not in ("torch.load", "eval", "exec"), path


# In the background


class Gate(TensorWriter):
    """A writer that threads, and nobody else, have to wait for."""

    opened = threading.Event()
    waiting = threading.Event()

    def write(self, source: LazyTensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.waiting.set()
            assert self.opened.wait(60)
        super().write(source)


def behind(folder: Path, budget: int) -> tuple[bool, bool, dict[str, Tensor]]:
    """Whether steps went on, whether the bytes are those of a synchronous save."""
    net = net_of(stage=1)
    step(net)
    save(net, folder, "now")
    Gate.opened.clear()
    Gate.waiting.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TensorWriter", Gate)
        under_way = save(net, folder, "later", background=budget)
        before = state(net)
        assert Gate.waiting.wait(60)
        for _ in range(3):
            step(net)
        unfinished = not (folder / "later" / "index.json").exists()
        Gate.opened.set()
        under_way.wait()
        under_way.wait()  # once more does nothing
    files = [values_of(data_file(folder, tag, rank())) for tag in ("now", "later")]
    torch.set_rng_state(before["random"])
    load(net, folder, "later")
    return (
        unfinished,
        files[0] == files[1],
        before | {f"got {k}": v for k, v in state(net).items()},
    )


@pytest.mark.parametrize("budget", [1 << 20, 8000], ids=["all", "part"])
def test_steps_go_on_while_files_are_written(
    two: Pool, tmp_path: Path, budget: int
) -> None:
    for unfinished, equal, found in two.run(behind, tmp_path, budget):
        assert unfinished and equal
        got = {k.removeprefix("got "): v for k, v in found.items() if k[:4] == "got "}
        assert all(torch.equal(v, found[k]) for k, v in got.items())
    assert complete(tmp_path, "now", "later", ranks=2)


class Recorded:
    """A copy stream, and its events, that write down who waits for whom."""

    log: list[str] = []

    def follow(self, *others: Any) -> None:
        self.log.append("follow")

    def copy(self, out: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        out.copy_(source)

    def event(self) -> Recorded:
        return self

    def wait(self, on: str) -> None:
        self.log.append(f"{on} waits")


def test_copies_from_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next piece comes while one is written; an update waits for what is copied."""
    log = Recorded.log = []
    put = TensorWriter._put
    monkeypatch.setattr(writer, "CopyStream", Recorded)
    monkeypatch.setattr(writer, "on_gpu", lambda tensor: True)
    monkeypatch.setattr("minizero.checkpoint.tensor_file.CHUNK", 40)
    monkeypatch.setattr(
        TensorWriter, "_put", lambda self, data: log.append("write") or put(self, data)
    )
    values = torch.arange(25.0)
    lazy = LazyTensor.of("a", values)
    lazy = dataclasses.replace(lazy, steady=values)
    file = TensorWriter(tmp_path / "f", [lazy])
    for tensor in writer.read_ahead([lazy]):
        file.write(tensor)
    file.finish()
    piece = ["cpu waits", "write"]
    assert log == ["write", "follow", "copy", "copy", *piece, "copy", *piece, *piece]
    with TensorFile(tmp_path / "f") as read:
        assert torch.equal(read.tensor("a"), values)
    net = net_of(stage=1)
    step(net)
    log.clear()
    Gate.opened.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TensorWriter", Gate)
        under_way = save(net, tmp_path, "a", background=1 << 20)
        copies = (
            ["copy"] * 3 * sum(len(unit.flats) for unit in net.units)
        )  # values and two moments
        assert [e for e in log if e != "cpu waits"] == ["write", "follow", *copies]
        step(net)
        assert log.count("device waits") == 1
        Gate.opened.set()
        under_way.wait()
        assert log.index("cpu waits") < log.index("write", 1)
    step(net)
    assert log.count("device waits") == 1


def second(folder: Path) -> list[str]:
    """The order in which two saves in a row happen, the first of them held up."""
    net, order = net_of(), []
    wait, begin = Saving.wait, Saving.begin
    Gate.opened.clear()

    def noted_wait(self: Saving) -> None:
        order.append(f"wait {self.path.name}")
        Gate.opened.set()
        wait(self)
        order.append(f"complete {self.path.name}")

    def noted_begin(self: Saving, *args: Any) -> None:
        order.append(f"begin {self.path.name}")
        begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TensorWriter", Gate)
        patch.setattr(Saving, "wait", noted_wait)
        patch.setattr(Saving, "begin", noted_begin)
        save(net, folder, "a", background=1 << 20)
        save(net, folder, "b", background=1 << 20)
        load(net, folder)  # waits too
    return order


def test_a_second_save_waits_for_the_first(two: Pool, tmp_path: Path) -> None:
    for order in two.run(second, tmp_path):
        assert order == [
            "begin a",
            "wait a",
            "complete a",
            "begin b",
            "wait b",
            "complete b",
        ]


def failing(folder: Path, how: str, background: int) -> list[str]:
    """Rank 1's disk is full, in one save; what is said, and when."""
    net, said = net_of(stage=2), []
    step(net)
    save(net, folder, "good")
    write = os.write

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(os, "write", full)
        try:
            under_way = save(net, folder, "bad", background=background)
            under_way._written.wait()
        except CheckpointError as error:
            assert not background
            return [str(error), load(net, folder).tag]
    os.write = write
    with pytest.raises(CheckpointError) as error:
        if how == "wait":
            under_way.wait()
        else:
            save(net, folder, "next")
    said.append(str(error.value))
    save(net, folder, "next")  # said once
    return [*said, load(net, folder).tag]


@pytest.mark.parametrize("how", ["now", "wait", "next save"])
def test_a_full_disk_of_one_rank(two: Pool, tmp_path: Path, how: str) -> None:
    background = 0 if how == "now" else 1 << 20
    first, other = two.run(failing, tmp_path, how, background)
    assert first == other
    assert re.search(
        r"bad\.tmp-\w{8}/rank-0001.*: the disk is full; free space", first[0]
    )
    tags = ["good"] if how == "now" else ["good", "next"]
    assert first[1] == tags[-1] and complete(tmp_path, *tags, ranks=2)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", tmp_path],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        net = net_of(nn.Sequential(nn.Linear(40, 40)))
        save(net, tmp_path, "a")
        for _ in range(3):
            with pytest.raises(CheckpointError, match="rank-0000.*the disk is full"):
                for n in range(9):
                    save(net, tmp_path, f"b{n}")
        left = {"a", *(tag for tag, _ in checkpoints(tmp_path))}
        assert complete(tmp_path, *left)
        shutil.rmtree(tmp_path / "b0")
        save(net, tmp_path, "a", keep=1)
        assert complete(tmp_path, "a")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_rank_that_never_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = net_of()
    save(net, tmp_path, "a")
    monkeypatch.setattr(commit, "TIMEOUT", 0.05)
    monkeypatch.setattr(commit, "world_size", lambda: 2)
    under_way = save(net, tmp_path, "b", background=1 << 20)
    with pytest.raises(CheckpointError, match="rank 1 has not finished .* is whole"):
        under_way.wait()
    assert complete(tmp_path, "a")
    alive = weakref.ref(net)
    del net, under_way
    gc.collect()
    assert alive() is None  # though the error knew where it came from


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/a: a part of the path is a file"):
        save(net_of(), tmp_path / "file", "a")
    with pytest.raises(CheckpointError, match="latest: a part of the path is a file"):
        load(net_of(), tmp_path / "file")
    with pytest.raises(CheckpointError, match="file: a part of the path is a file"):
        save(net_of(), tmp_path, "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="there is something of that name"):
        save(net_of(), tmp_path / "nowhere", "a")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "nowhere"}


def disagree(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        save(net_of(), folder, f"tag-{rank()}")
    return str(error.value)


def test_ranks_that_disagree(two: Pool, tmp_path: Path) -> None:
    first, other = two.run(disagree, tmp_path)
    assert first == other and "pass the same on all ranks" in first
    assert not names(tmp_path)


# What a checkpoint may hold


VALUES: list[Any] = [
    None,
    True,
    -3,
    2**80,
    0.1,
    -0.0,
    float("inf"),
    "ä\ud800",
    b"\x00\xff",
    [1, [2]],
    (1, (2.5, None)),
    {1, 2},
    {},
    {"a": {"b": 1}},
    {1: "x", (2, 3): "y"},
    {"$tuple": [1]},
    {"a": 1, "$b": 2},
    Counter({30: 2}),
    OrderedDict(b=1, a=2),
    {"deep": [{"er": (Counter("aab"),)}]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value: Any) -> None:
    tree, tensors = encode(value, "x")
    back = decode(json.loads(json.dumps(tree, allow_nan=False)), tensors.__getitem__)
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    value = [torch.ones(()).to(dtype), torch.arange(6).view(2, 3).to(dtype), {}]
    tree, tensors = encode(value, "x")
    sources = [LazyTensor.of(name, t) for name, t in tensors.items()]
    writer = TensorWriter(tmp_path / "f", sources)
    for source in sources:
        writer.write(source)
    writer.finish()
    with TensorFile(tmp_path / "f") as file:
        back = decode(json.loads(json.dumps(tree)), file.tensor)
    for mine, its in zip(value[:2], back[:2], strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        assert mine.tolist() == its.tolist()


def test_lazy_tensors(tmp_path: Path) -> None:
    """Whose bytes are not yet what they stand for; and a name that is taken."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    lazy = [value.conj(), value.conj().imag, value.conj()[:1]]
    assert lazy[0].is_conj() and lazy[1].is_neg()
    sources = [LazyTensor.of(f"{n}", t) for n, t in enumerate(lazy)]
    writer = TensorWriter(tmp_path / "f", sources)
    for source in sources:
        writer.write(source)
    writer.finish()
    with TensorFile(tmp_path / "f") as file:
        assert all(torch.equal(file.tensor(f"{n}"), t) for n, t in enumerate(lazy))
    for name in ("0", "__metadata__"):
        with pytest.raises(CheckpointError, match=f"two tensors of the name '{name}'"):
            TensorWriter(tmp_path / "g", [*sources, LazyTensor.of(name, value)])
    assert names(tmp_path) == ["f"]


def test_numpy_s_values() -> None:
    array = numpy.arange(3, dtype=numpy.uint32)
    tree, tensors = encode([numpy.float64(0.1), numpy.int8(3), array], "x")
    back = decode(json.loads(json.dumps(tree)), tensors.__getitem__)
    assert back[:2] == [0.1, 3] and [type(v) for v in back[:2]] == [float, int]
    assert back[2].dtype == array.dtype and (back[2] == array).all()


def test_what_would_need_pickle_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value, text in (
        (loop, r"x\[0\]\['again'\] contains itself"),
        ({"a": [object()]}, r"x\['a'\]\[0\] is a builtins.object"),
        (random.Random(), "x is a random.Random"),
        ({object(): 1}, "a key of x is a builtins.object"),
        (torch.ones(2).to_sparse(), "x is a torch.sparse_coo tensor"),
        (numpy.array(["a"]), "x: "),
        ([numpy.arange(3, dtype=">f4")], r"x\[0\]: .* byte order"),
        ({"big": 1 << 20_000}, r"x\['big'\] is an integer of 20,001 bits"),
        (deep, "x is nested too deeply"),
    ):
        with pytest.raises(TypeError, match=text):
            encode(value, "x")


# The format of the files


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7),
        "c": torch.randn(9).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "ä": torch.tensor([True, False]),
    }
    sources = [LazyTensor.of(name, t) for name, t in tensors.items()]
    sources.sort(key=lambda s: -s.dtype.itemsize)
    writer = TensorWriter(tmp_path / "mine", sources, {"format": "pt"})
    for source in sources:
        writer.write(source)
    writer.finish()
    read = load_file(tmp_path / "mine")
    assert all(torch.equal(read[name], t) for name, t in tensors.items())
    save_file(tensors, tmp_path / "theirs")
    with TensorFile(tmp_path / "theirs") as file:
        assert file.entries.keys() == tensors.keys()
        for name, t in tensors.items():
            assert torch.equal(file.tensor(name), t)
        part = file.read("b", 2, torch.empty(3, dtype=torch.float64))
        assert part.tolist() == [2.0, 3.0, 4.0]


def test_headers_that_lie(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers: list[Any] = [
        [], 5, {"a": 1}, {"a": {}}, {"a": entry | {"dtype": "F33"}},
        {"a": entry | {"shape": [3]}}, {"a": entry | {"shape": [-1, -2]}},
        {"a": entry | {"data_offsets": [-8, 0]}}, {"a": entry | {"shape": "xy"}},
        {"a": entry | {"data_offsets": [8, 16]}}, {"a": entry | {"data_offsets": [0]}},
    ]  # fmt: skip
    raws = [json.dumps(h).encode() for h in headers]
    files = [len(raw).to_bytes(8, "little") + raw + bytes(8) for raw in raws]
    files += [b"", b"1234567", b"\xff" * 64, (9).to_bytes(8, "little") + b"{" * 9]
    for raw in files:
        (tmp_path / "f").write_bytes(raw)
        with pytest.raises(CheckpointError, match="f: this is no safetensors file"):
            TensorFile(tmp_path / "f")


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    path = data_file(tmp_path, "a")
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="the file ends at byte .* truncated"):
            for name in file.entries:
                file.tensor(name)


def test_the_index_says_where_everything_is(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    index = parse_index(*read_index(tmp_path, None))
    assert isinstance(index, Index) and index.tag == "a" and index.number == 1
    flat = index.flats[0]
    assert [(s.name, s.shape, s.offset) for s in flat.slots] == [
        ("0.weight", [WIDTH, WIDTH], 0),
        ("0.bias", [WIDTH], WIDTH * WIDTH),
    ]
    assert flat.states == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    assert list(flat.scalars) == ["step"] and index.optimizer == "AdamW"
    path = data_file(tmp_path, "a")
    assert index.files[0].bytes == path.stat().st_size
    assert index.files[0].crc32 == zlib.crc32(path.read_bytes())


class Counting(nn.Linear):
    """A module with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    net = net_of(nn.Sequential(Counting()))
    net.model[0].count = 5
    save(net, tmp_path, "a")
    other = net_of(nn.Sequential(Counting()))
    load(other, tmp_path)
    assert other.model[0].count == 5


def test_gradients_are_forgotten(tmp_path: Path) -> None:
    net = net_of(stage=2)
    save(net, tmp_path, "a")
    net.backward(net(torch.rand(4, WIDTH)).sum())
    load(net, tmp_path)
    assert float(net.clip_grad_norm(1.0)) == 0.0


def test_two_nets_save_into_one_folder(tmp_path: Path) -> None:
    """The sweep of one leaves the files of the other, which is under way, alone."""
    first, other = net_of(), net_of(model(1))
    Gate.opened.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TensorWriter", Gate)
        under_way = save(first, tmp_path, "a", background=1 << 20)
        save(other, tmp_path, "b")
        Gate.opened.set()
        under_way.wait()
    assert complete(tmp_path, "a", "b")
    load(first, tmp_path, "a")


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """The second cannot know that the first's files are not a killed save's."""
    first, other = net_of(), net_of(model(1))
    save(first, tmp_path, "good")
    Gate.opened.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TensorWriter", Gate)
        under_way = save(first, tmp_path, "a", keep=1, background=1 << 20)
        commit.busy.clear()  # as in another process
        save(other, tmp_path, "b", latest=False)
        Gate.opened.set()
        with pytest.raises(CheckpointError, match="give every job a folder of its own"):
            under_way.wait()
    assert load(first, tmp_path).tag == "good"
    save(first, tmp_path, "c")
    assert complete(tmp_path, "good", "b", "c")


def test_loading_twice_and_saving_again(tmp_path: Path) -> None:
    net = net_of()
    step(net)
    save(net, tmp_path, "a")
    before = state(net)
    load(net, tmp_path)
    load(net, tmp_path)
    assert same(state(net), before)
    save(net, tmp_path, "b", extra={"loss": float("nan")})
    files = [values_of(data_file(tmp_path, tag)) for tag in "ab"]
    assert files[0] == files[1] and math.isnan(load(net, tmp_path).extra["loss"])


class Odd(nn.Module):
    """Names that a shell, a path or JSON would mind; alone: a group for each."""

    NAMES = ("a/b", "ä b", "'\"", "~up", "$tensor", "0")

    def __init__(self) -> None:
        super().__init__()
        for n, name in enumerate(self.NAMES):
            self.register_parameter(name, nn.Parameter(torch.full((2,), n + 1.0)))
            self.register_buffer(f"{name} buffer", torch.full((2,), n + 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p * x for p in self.parameters()]).sum()


def odd(ranks_state: bool) -> DataParallel:
    module = nn.ModuleDict({"extra": nn.Sequential(Odd()), "own/0": Odd()})
    params = list(module.parameters())
    groups = [{"params": [p], "lr": 0.1 / (1 + n)} for n, p in enumerate(params)]
    net = parallelize(module, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    if ranks_state:
        net.backward(module["extra"](torch.ones(2)))  # the others have no gradient
        net.step()
    return net


def test_odd_names_and_groups(tmp_path: Path) -> None:
    net, other = odd(True), odd(False)
    save(net, tmp_path, "a")
    load(other, tmp_path)
    assert same(state(net), state(other))
    for mine, its in zip(
        net.optimizer.param_groups, other.optimizer.param_groups, strict=True
    ):
        assert mine["lr"] == its["lr"]
    load(net, tmp_path)
    save(odd(False), tmp_path, "b")  # an optimizer without any state
    load(net, tmp_path, "b")
    assert not any("momentum" in key for key in state(net))


def test_a_scheduler_does_not_hide_the_optimizer(tmp_path: Path) -> None:
    """It wraps `step`, and copies that are probed must not step the original."""
    from minizero import NVMe

    module = nn.Linear(8, 8)
    bad = torch.optim.Adafactor(module.parameters())
    torch.optim.lr_scheduler.StepLR(bad, 1)
    with pytest.raises(ValueError, match="element-wise optimizer"):
        parallelize(module, bad)
    plan = Plan.stage(1, "nvme")
    optimizer = torch.optim.AdamW(module.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    home = NVMe(plan, tmp_path)
    net = parallelize(module, optimizer, plan, home=home)
    net.backward(net(torch.rand(2, 8)).sum())
    net.step()
    assert home.on_disk.optimizer == 2 * 72 * 4
    home.close()


def test_errors_reach_the_parent(two: Pool, tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match="CheckpointError: .*no checkpoint in this fold"
    ):
        two.run(lambda: load(net_of(), tmp_path))
