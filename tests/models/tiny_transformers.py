"""Tiny random models of the supported families, sharp enough that a wrong mask changes every logit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 97
WINDOW = 16
MAX_POSITIONS = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "llama3-rope": LlamaConfig(**_COMMON, rope_parameters=_LLAMA3_ROPE),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen2-window": Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**_COMMON, head_dim=16),
    "mistral-window": MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3-window": Gemma3TextConfig(
        **_COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def tiny_model(name: str, attn_implementation: str = "sdpa", sharpness: float = 5.0) -> Any:
    """A float32 model of one of the families, with weights from a fixed seed."""
    return sharp_model(deepcopy(CONFIGS[name]), attn_implementation, sharpness)


def sharp_model(config: PretrainedConfig, attn_implementation: str, sharpness: float = 5.0) -> Any:
    """A float32 model with weights from a fixed seed, `sharpness` times as large as usual."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)
    return model.eval()


@torch.no_grad()
def own_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The model's logits `[len(ids), V]` in one forward without a cache."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def own_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` of transformers continues `prompt` with."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()
