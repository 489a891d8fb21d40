"""A llama with random weights in a few hundred kilobytes: small enough to check all, real enough for llama.cpp."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

HEADS, HEAD_SIZE, LAYERS, HIDDEN = 4, 16, 2, 128
END = 1
"""The id that ends a text."""


def write_tiny_llama(
    path: Path,
    seed: int = 0,
    vocab_size: int = 96,
    context: int = 256,
    *,
    scale: float = 1.0,
    causal: bool = True,
    any_text: bool = False,
) -> Path:
    """Write a 2-layer float32 llama. `scale` multiplies its logits: larger makes its greedy choices clearer.

    Ids: 0 starts a text, 1 ends it, the others are single characters; with `any_text` the last 258 are sentencepiece's
    space, what is unknown, and bytes, without which llama.cpp can tokenize no other character.
    """
    characters = vocab_size - 2 - 258 * any_text
    random = np.random.default_rng(seed)
    width = HEADS * HEAD_SIZE

    def weights(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_causal_attention(causal)
    writer.add_tokenizer_model("llama")
    tokens = ["<s>", "</s>", *(chr(0x4E00 + i) for i in range(characters))]
    kinds = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * characters
    if any_text:
        writer.add_unk_token_id(len(tokens) + 1)
        tokens += ["▁", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds += [TokenType.NORMAL, TokenType.UNKNOWN] + [TokenType.BYTE] * 256
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(END)
    writer.add_tensor("token_embd.weight", weights(vocab_size, width))
    for i in range(LAYERS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.attn_q.weight", weights(width, width))
        writer.add_tensor(f"blk.{i}.attn_k.weight", weights(width // 2, width))
        writer.add_tensor(f"blk.{i}.attn_v.weight", weights(width // 2, width))
        writer.add_tensor(f"blk.{i}.attn_output.weight", weights(width, width))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_gate.weight", weights(HIDDEN, width))
        writer.add_tensor(f"blk.{i}.ffn_up.weight", weights(HIDDEN, width))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", weights(width, HIDDEN))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", scale * weights(vocab_size, width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_mamba(path: Path, vocab_size: int = 96, context: int = 256) -> Path:
    """The smallest recurrent model that llama.cpp loads."""
    width, inner, state, rank, kernel = 32, 64, 4, 2, 4
    writer = GGUFWriter(path, "mamba")
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_tokenizer_model("no_vocab")
    shapes = {
        "token_embd.weight": (vocab_size, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
