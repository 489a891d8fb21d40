"""What models and their caches will take, known from their files before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duo_ray.config import ConfigError
from duo_ray.models.gguf_header import GgufHeader
from duo_ray.models.quantization import LINEAR_BYTES

_GIB = 2**30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_BYTES = 2
"""llama.cpp's caches are float16."""
_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9, "Q2_K": 3.4}
"""Bits of a weight in llama.cpp's usual quantisations, best first."""
NEVER_REPACKED = frozenset({"F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1"})
"""Quantisations that llama.cpp has no layout for but the file's own: processes share its mapped pages."""
_FEWEST_TOKENS = 256
"""A smaller context is not proposed."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of one model in one process; scratch memory, some hundred MiB at most, is left out."""

    weights: int
    per_token: int
    """K and V of one token in all layers."""
    tokens: int
    """Tokens a slot holds."""
    slots: int
    parameters: int

    @property
    def cache(self) -> int:
        return self.per_token * self.tokens * self.slots

    @property
    def total(self) -> int:
        return self.weights + self.cache

    def __str__(self) -> str:
        return (
            f"{_gib(self.total)}: weights {_gib(self.weights)}, KV cache {_gib(self.cache)}"
            f" ({self.slots} x {self.tokens} tokens)"
        )


def gguf_memory(header: GgufHeader, *, tokens: int, slots: int) -> ModelMemory:
    """A .gguf file in llama.cpp: weights as in the file, K and V of `slots` requests of `tokens` tokens in float16."""
    weights = sum(tensor.size for tensor in header.tensors)
    return ModelMemory(weights, _KV_BYTES * _gguf_cache_width(header), tokens, slots, header.parameters)


def directory_memory(
    folder: Path, dtype: str, *, tokens: int, slots: int, packed: bool, quantization: str = "none"
) -> ModelMemory:
    """A directory in transformers, weights and cache in `dtype`.

    Args:
        packed: linear layers are prepacked (on a CPU): an output layer tied to the embedding then has its own copy.
    """
    item = _ITEM_BYTES[dtype]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: Mapping[str, Any] = config.get("text_config", config)
    parameters = sum(_safetensors_elements(file) for file in folder.glob("*.safetensors"))
    hidden, layers = _first(text, "hidden_size", "n_embd"), _first(text, "num_hidden_layers", "n_layer")
    heads = _first(text, "num_attention_heads", "n_head")
    head_dim = text.get("head_dim") or hidden // heads
    width = 2 * layers * (text.get("num_key_value_heads") or heads) * head_dim
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    copied = text["vocab_size"] * hidden if packed and tied else 0
    kept = text["vocab_size"] * hidden * (1 if tied else 2)  # embedding and output layer stay as they are
    linear = LINEAR_BYTES.get(quantization, item)
    weights = item * (kept + copied) + int(linear * (parameters - kept))
    return ModelMemory(weights, item * width, tokens, slots, parameters)


def check_memory(
    models: Mapping[str, ModelMemory], available: int, place: str, *, smaller: Mapping[str, ModelMemory] | None = None
) -> None:
    """Refuse models that together take more than `available` bytes; `models` are named target, draft 0, ...

    `smaller`: settings to suggest where one of them makes the target fit; without, other contexts and .gguf files are.

    Raises:
        ConfigError: one line: what they take, what there is, and what would fit.
    """
    needed = sum(model.total for model in models.values())
    if needed <= available:
        return
    parts = "; ".join(f"{name} {model}" for name, model in models.items())
    fitting = next((setting for setting, model in (smaller or {}).items() if model.total <= available), None)
    way_out = _way_out(models, available) if fitting is None else f"{fitting} would fit"
    raise ConfigError(f"{_gib(needed)} are needed, but {_gib(available)} of {place} are free ({parts}): {way_out}")


def _way_out(models: Mapping[str, ModelMemory], available: int) -> str:
    left = available - sum(model.weights for model in models.values())
    caches = sum(model.cache for model in models.values())
    target = models.get("target")
    if target is not None and left > 0:
        ways = []
        if tokens := [t for t in _powers(target.tokens) if caches * t <= left * target.tokens]:
            ways.append(f"models.target.max_seq_len: {tokens[0]}")
        if slots := left * target.slots // caches:
            ways.append(f"models.target.slots: {slots}")
        if ways:
            return f"{' or '.join(ways)} would fit"
    largest, name = max((model.weights, name) for name, model in models.items())
    free = available - sum(replace(m, slots=1, tokens=_FEWEST_TOKENS).total for m in models.values()) + largest
    for quant, bits in _BITS.items():
        size = int(models[name].parameters * bits / 8)
        if size <= min(free, largest - 1):
            return f"the {name} as a {quant} .gguf file ({_gib(size)}) would fit, with a small context"
    return f"no quantisation of this {name} would fit: use a smaller model"


def _powers(tokens: int) -> list[int]:
    """Smaller contexts, largest first."""
    powers = []
    power = 1 << (tokens - 1).bit_length() - 1
    while power >= _FEWEST_TOKENS:
        powers.append(power)
        power //= 2
    return powers


def _gguf_cache_width(header: GgufHeader) -> int:
    """Numbers that K and V of one token have in all layers."""
    arch, metadata = header.architecture, header.metadata
    embedding = int(metadata.get(f"{arch}.embedding_length", 0))
    # By the projections' shapes, as the number of heads may differ from layer to layer.
    shapes = [t.elements for t in header.tensors if t.name.endswith((".attn_k.weight", ".attn_v.weight"))]
    if shapes and embedding:
        return sum(shapes) // embedding
    heads = int(metadata.get(f"{arch}.attention.head_count", 1))
    kv_heads = int(metadata.get(f"{arch}.attention.head_count_kv", heads))
    width = int(metadata.get(f"{arch}.attention.key_length", embedding // heads))
    return 2 * int(metadata.get(f"{arch}.block_count", 0)) * kv_heads * width


def _safetensors_elements(file: Path) -> int:
    """Numbers in a safetensors file, by its header: 8 bytes of length, then JSON."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        tensors = json.loads(content.read(length) or b"{}")
    total = 0
    for name, tensor in tensors.items():
        if name != "__metadata__":
            elements = 1
            for side in tensor["shape"]:
                elements *= side
            total += elements
    return total


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next(int(config[name]) for name in names if name in config)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
