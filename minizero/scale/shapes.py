"""The shape of a transformer, and the shapes that have been published."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any


def check_counts(**counts: int) -> None:
    """Raise ValueError unless all are whole numbers of at least 1."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")


@dataclass(frozen=True)
class Shape:
    """A decoder of equal blocks.

    kv_heads: heads of keys and values (default: `heads`). ffn_hidden: width of the
        hidden layer (default: 4 * hidden).
    gated: two products into the hidden layer (a GLU), rotary positions and no biases,
        as in Llama; else biases, as in GPT.
    tied: the head is the embedding (default: where it is not gated).
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    gated: bool = False
    tied: bool | None = None

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads", "vocab", "kv_heads", "ffn_hidden")
        sizes = {name: getattr(self, name) for name in names}
        check_counts(**{name: n for name, n in sizes.items() if n is not None})
        if self.hidden % self.heads or self.heads % self.key_heads:
            raise ValueError(
                f"heads must divide hidden, and kv_heads must divide heads: "
                f"{self.hidden}, {self.heads} and {self.key_heads} do not"
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def kv(self) -> int:
        """Elements of a token's keys."""
        return self.hidden // self.heads * self.key_heads

    @property
    def ffn(self) -> int:
        """Elements of a token in the hidden layer."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are one matrix."""
        return not self.gated if self.tied is None else self.tied

    @property
    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a block's matrix products, in order."""
        h = self.hidden
        up = 2 * self.ffn if self.gated else self.ffn
        return [(h, h + 2 * self.kv), (h, h), (h, up), (self.ffn, h)]

    @property
    def block(self) -> int:
        """Parameters of a block."""
        weights = sum(i * o for i, o in self.products)
        if self.gated:
            return weights + 2 * self.hidden
        return weights + sum(o for _, o in self.products) + 4 * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside of the blocks; learned positions are not counted."""
        tables = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return tables + self.hidden * (1 if self.gated else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.root


_gpt = partial(Shape, vocab=50_368)
_LLAMA = Shape(32, 4096, 32, 32_000, ffn_hidden=11_008, gated=True)
_LLAMA_70B = Shape(80, 8192, 64, 128_256, 8, 28_672, True)
MODELS = {
    "gpt2": _gpt(12, 768, 12, vocab=50_257),
    "gpt2-xl": _gpt(48, 1600, 25, vocab=50_257),
    "gpt-175b": _gpt(96, 12_288, 96, vocab=51_200),
    "mpt-125m": _gpt(12, 768, 12),
    "mpt-350m": _gpt(24, 1024, 16),
    "mpt-760m": _gpt(24, 1536, 12),
    "mpt-1b": _gpt(24, 2048, 16),
    "mpt-3b": _gpt(32, 2560, 20),
    "mpt-7b": _gpt(32, 4096, 32),
    "mpt-13b": _gpt(40, 5120, 40),
    "mpt-30b": _gpt(48, 7168, 56),
    "mpt-70b": _gpt(80, 8192, 64),
    "llama-7b": _LLAMA,
    "llama-13b": replace(_LLAMA, layers=40, hidden=5120, heads=40, ffn_hidden=13_824),
    "llama-8b": replace(_LLAMA, vocab=128_256, kv_heads=8, ffn_hidden=14_336),
    "llama-70b": _LLAMA_70B,
    "llama-405b": Shape(126, 16_384, 128, 128_256, 8, 53_248, True),
    "llama2-34b": Shape(48, 8192, 64, 32_000, 8, 22_016, True),
    "llama2-70b": replace(_LLAMA_70B, vocab=32_000),
    "mistral-7b": replace(_LLAMA, kv_heads=8, ffn_hidden=14_336),
}
"""Published shapes: Radford et al. 2019; Narayanan et al. 2021; MosaicML's
llm-foundry; Touvron et al. 2023; Grattafiori et al. 2024; Jiang et al. 2023."""

# what Hugging Face's configs call the fields of `Shape`; the first that is there counts
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "ffn_hidden": ("intermediate_size", "n_inner"),
    "tied": ("tie_word_embeddings",),
}


def find(model: str) -> Shape:
    """A published shape by its name, or that of a Hugging Face `config.json`."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    if not path.exists():
        raise ValueError(
            f"model must be one of {', '.join(MODELS)}, or the path of a config.json, "
            f"not {model!r}"
        )
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    given = {key: value for key, value in config.items() if value is not None}
    found: dict[str, Any] = {"tied": True} | {  # as for transformers
        name: next(given[key] for key in keys if key in given)
        for name, keys in _KEYS.items()
        if given.keys() & {*keys}
    }
    if missing := [n for n in ("layers", "hidden", "heads", "vocab") if n not in found]:
        wanted = ", ".join(" or ".join(_KEYS[name]) for name in missing)
        raise ValueError(f"{path} does not say {wanted}; is it a decoder's config?")
    is_gemma = given.get("model_type") == "gemma"  # the one GLU with a gelu
    gated = is_gemma or given.get("hidden_act") in ("silu", "swiglu")
    shape = Shape(gated=gated, **found)
    width = given.get("head_dim", shape.hidden // shape.heads)
    if width * shape.heads != shape.hidden or "expert" in " ".join(given):
        raise ValueError(f"{path} has experts or its own head_dim; `Shape` has neither")
    return shape
