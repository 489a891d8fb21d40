"""GGUF models of any shape, as slow as real ones, whose greedy text and agreement are set by construction.

Attention and feed-forward layers hold random weights and are computed in full, but add nothing: what follows a token
depends on that token alone, by a permutation of the vocabulary written into embedding and output layer. A draft whose
permutation differs for some tokens is right that often.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

VOCAB = 4096
_SPECIAL = 2
_SURE = 20.0
"""About the logit of the token that follows; all others are near 0."""
_BYTES = 258
"""Sentencepiece's space, what is unknown, and bytes: without them llama.cpp cannot tokenize every text."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama's measures."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int


ONE_BILLION = Shape(layers=16, hidden=2048, feed_forward=8192, heads=32, kv_heads=8)
"""Llama 3.2 1B, but for its vocabulary."""
SMALL = Shape(layers=6, hidden=512, feed_forward=1536, heads=8, kv_heads=8)


def write_shaped(path: Path, shape: Shape, agreement: float, seed: int = 0) -> Path:
    """A Q4_0 llama that continues as every other one of the same seed does after this share of all tokens."""
    random = np.random.default_rng(seed)
    tokens = np.arange(_SPECIAL, VOCAB - _BYTES)
    following = np.arange(VOCAB)
    following[tokens] = random.permutation(tokens)
    wrong = random.permutation(tokens)[: round((1.0 - agreement) * len(tokens))]
    following[wrong] = np.roll(following[wrong], 1)
    meaning = random.standard_normal((VOCAB, shape.hidden), dtype=np.float32)
    output = np.zeros_like(meaning)
    output[following[tokens]] = meaning[tokens]
    writer = GGUFWriter(path, "llama")
    _describe(writer, shape)
    writer.add_tensor("token_embd.weight", meaning)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    writer.add_tensor("output.weight", _SURE * output / shape.hidden)
    kv = shape.hidden // shape.heads * shape.kv_heads
    sides = {
        "attn_q": (shape.hidden, shape.hidden),
        "attn_k": (kv, shape.hidden),
        "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, shape.hidden),
        "ffn_gate": (shape.feed_forward, shape.hidden),
        "ffn_up": (shape.feed_forward, shape.hidden),
        "ffn_down": (shape.hidden, shape.feed_forward),
    }
    for layer in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(shape.hidden, np.float32))
        for name, (rows, columns) in sides.items():
            scale = 0.0 if name in ("attn_output", "ffn_down") else 0.01
            blocks = _q4_0(random, rows, columns, scale)
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _q4_0(random: np.random.Generator, rows: int, columns: int, scale: float) -> NDArray[np.uint8]:
    """Random weights `[rows, columns]` as Q4_0: for every 32 of them a float16 scale and 16 bytes."""
    blocks = random.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _describe(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(2)
    writer.add_tokenizer_model("llama")
    characters = VOCAB - _SPECIAL - _BYTES
    texts = ["<s>", "</s>", *(chr(0x4E00 + i) for i in range(characters)), "▁", "<unk>"]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [TokenType.CONTROL] * _SPECIAL + [TokenType.NORMAL] * (characters + 1) + [TokenType.UNKNOWN]
    kinds += [TokenType.BYTE] * 256
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(VOCAB - 257)
