"""A sharded checkpoint as one state dict, and as files that Hugging Face reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from nasty import Case, same
from resumed import Small, steps
from safetensors.torch import load_file
from torch import Tensor

from minizero import Plan, parallelize
from minizero.__main__ import main
from minizero.checkpoint import CheckpointError, consolidate, export, save
from minizero.ranks import Pool

os.environ["HF_HUB_OFFLINE"] = "1"


def trained(folder: Path, stage: int, precision: str = "fp32") -> dict[str, Tensor]:
    net = Case(Plan.stage(stage), precision).build(Small)
    steps(net, 0, 2)
    save(net, folder, "t")
    return net.state_dict()


def files(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_one_state_dict_for_a_plain_model(two: Pool, tmp_path: Path) -> None:
    """Tied, frozen and unused parameters and buffers, from every rank's file."""
    expected = two.run(trained, tmp_path, 3)[0]
    got = consolidate(tmp_path)
    umask = os.umask(0)
    os.umask(umask)
    for path in tmp_path.glob("t/*"):  # every user may read it that the umask lets
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert same(got, expected) and got.keys() == Small().state_dict().keys()
    assert got["head.weight"].data_ptr() == got["tokens.weight"].data_ptr()
    # files have all names, too: a strict load into plain torch takes them
    export(tmp_path, tmp_path / "out", max_shard_size=3000)
    for state in (got, files(tmp_path / "out")):
        model = Small()
        model.load_state_dict(state)
        assert model.head.weight is model.tokens.weight
        assert torch.equal(model.places.weight, expected["places.weight"])
        assert model.calls == 2


def test_masters_are_what_is_consolidated_and_exported(tmp_path: Path) -> None:
    """fp32, and not what 16-bit parameters were rounded to, unless asked for it."""
    rounded = trained(tmp_path, 2, "bf16")
    whole = consolidate(tmp_path, "t")
    floats = {name for name, t in whole.items() if t.is_floating_point()}
    assert {whole[name].dtype for name in floats} == {torch.float32}
    assert whole["calls"].dtype == torch.int64
    for name in floats - {"mean", "statistics"}:  # the root has no parameters
        assert torch.equal(whole[name].to(torch.bfloat16), rounded[name]), name
    assert not torch.equal(whole["tokens.weight"], rounded["tokens.weight"].float())
    for dtype in (None, torch.float16):
        out = tmp_path / f"{dtype}"
        paths = export(tmp_path, out, dtype=dtype)
        assert [path.name for path in paths] == ["model.safetensors"]
        found = files(out)
        assert whole.keys() == found.keys()
        for name, t in found.items():
            # a frozen parameter was saved in 16 bit; a master in 32
            saved = torch.bfloat16 if "places" in name or "scale" in name else None
            wanted = dtype or saved or whole[name].dtype
            assert t.dtype == (wanted if name in floats else torch.int64)
            assert torch.equal(t, whole[name].to(t.dtype)), name


def test_what_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    out = tmp_path / "out"
    export(tmp_path, out, max_shard_size=3000)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(CheckpointError, match="out: it has weights already"):
        export(tmp_path, out)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    for options, text in (
        ({"max_shard_size": 0}, "a number of bytes, at least 1, not 0"),
        ({"max_shard_size": "5GB"}, "at least 1, not '5GB'"),
        ({"tag": "q"}, "there is no checkpoint 'q'"),
    ):
        with pytest.raises(CheckpointError, match=text):
            export(tmp_path, tmp_path / "other", **options)  # type: ignore[arg-type]
    [path] = tmp_path.glob("t/*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    for work in (consolidate, lambda folder: export(folder, tmp_path / "new")):
        with pytest.raises(CheckpointError, match=path.name):
            work(tmp_path)
    assert not list((tmp_path / "new").iterdir())


def gpt2(folder: Path) -> None:
    """Saved under ZeRO-3, exported in many files, read by transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 16}
    config = GPT2Config(**sizes, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    net = parallelize(model, torch.optim.AdamW(model.parameters()), Plan.stage(3))
    save(net, folder, "t")
    expected = net.state_dict()
    if not expected:  # another rank than 0
        return
    assert len(export(folder, folder / "out", max_shard_size=4000)) > 10
    config.save_pretrained(folder / "out")
    read = GPT2LMHeadModel.from_pretrained(folder / "out")
    assert same(read.state_dict(), expected)
    assert read.lm_head.weight is read.transformer.wte.weight


@pytest.mark.thorough
def test_hugging_face_reads_it(two: Pool, tmp_path: Path) -> None:
    two.run(gpt2, tmp_path)
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in out.glob("*.s*rs")}
    total = sum(t.nbytes for t in files(out).values())
    assert index["metadata"]["total_size"] == total


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 1)
    out = tmp_path / "out"
    (out / "model_card").mkdir(parents=True)
    words = ["consolidate", str(tmp_path), str(out), "--tag", "t", "--dtype", "bf16"]
    assert main(words) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(out / "model.safetensors")]
    assert {t.dtype for t in files(out).values()} == {torch.bfloat16, torch.int64}
    assert main(words) == 2
    assert "it has weights already" in capsys.readouterr().err
    assert main(["consolidate", str(tmp_path / "nothing"), str(out / "new")]) == 2
    assert "there is no checkpoint in this folder" in capsys.readouterr().err
