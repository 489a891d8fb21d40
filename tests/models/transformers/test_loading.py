"""What can be a target, how it is loaded, and what it tells of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from duo_ray.models.transformers import TransformersTarget, UnsupportedModel, check_config
from duo_ray.types import (
    ContextOverflow,
    NonFiniteLogits,
)
from tests.models.tiny_transformers import MAX_POSITIONS, own_greedy, own_logits, tiny_model
from tests.models.verifying import Client, no_block, random_blocks, random_ids, step

# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, llama: Any) -> Iterator[Path]:
    llama.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_directory_of_safetensors_loads_in_any_dtype(dtype: str, saved: Path, llama: Any) -> None:
    target = TransformersTarget.load(saved, dtype=dtype, threads=1, max_context=100)
    client = Client("a", random_ids(20, seed=19))
    token = step(target, [client], no_block).verdicts[0].token
    logits = own_logits(deepcopy(llama).to(getattr(torch, dtype)), client.prompt)[-1]
    assert token == int(logits.argmax())
    assert torch.get_num_threads() == 1


def test_a_device_map_is_followed(saved: Path, llama: Any) -> None:
    target = TransformersTarget.load(saved, device_map={"": "cpu"}, max_context=100)
    client = Client("a", random_ids(20, seed=20))
    step(target, [client], random_blocks(0))
    assert client.emitted[0] == own_greedy(llama, client.prompt, 1)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of float32, bfloat16, float16"),
        ({"attn_implementation": "flash"}, "'flash' is none of sdpa, eager and flash_attention_2"),
        ({"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}, "device='cpu'.* CUDA devices .* use sdpa"),
        ({"max_context": MAX_POSITIONS + 1}, f"max_context={MAX_POSITIONS + 1} is out of range: 1 to {MAX_POSITIONS}"),
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1 must be at least 1"),
    ],
)
def test_an_argument_out_of_range_is_named(options: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersTarget.load(saved, **options)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(), "mamba cannot be a target: .*linear_attention"),
        (JambaConfig(), "jamba cannot be a target: .*linear_attention"),
        (RecurrentGemmaConfig(), "recurrent_gemma cannot be a target: .*linear_attention"),
        (Llama4TextConfig(), "llama4_text cannot be a target: .*chunked_attention"),
        (T5Config(), "t5 cannot be a target: it is an encoder-decoder"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "RoPE type dynamic"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 1024,
                    "short_factor": [1.0] * 64,
                    "long_factor": [2.0] * 64,
                }
            ),
            "RoPE type longrope",
        ),
    ],
)
def test_architectures_that_cannot_be_cropped_are_refused(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(config)


def test_a_recurrent_model_is_refused_even_when_its_config_is_silent() -> None:
    model = tiny_model("llama")
    model._is_stateful = True
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        TransformersTarget(model)


def test_a_refused_architecture_is_not_even_read(tmp_path: Path) -> None:
    MambaConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)  # and no weights
    with pytest.raises(UnsupportedModel, match="mamba"):
        TransformersTarget.load(tmp_path)


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(positions: torch.Tensor, keys: int, windows: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*positions.shape[:1], 1, positions.shape[1], keys, dtype=dtype)

    monkeypatch.setattr("duo_ray.models.slot_attention.attention_masks", everything)
    with pytest.raises(UnsupportedModel, match="off by"):
        TransformersTarget(tiny_model("llama"))


def test_a_model_that_needs_what_slots_cannot_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model.model).forward

    def without_positions(self: Any, *args: Any, position_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(self, *args, **rest)

    monkeypatch.setattr(type(model.model), "forward", without_positions)
    with pytest.raises(UnsupportedModel, match="trial run"):
        TransformersTarget(model)


def test_weights_that_are_broken_on_disk_are_reported_at_load() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLogits):
        TransformersTarget(model)


# --- measurements -----------------------------------------------------------------------------------------------


def test_warm_up_times_passes_of_growing_width(target: TransformersTarget) -> None:
    timings = target.warm_up(steps=2)
    assert [n for n, _ in timings] == [1, 2, 4, 8, 16, 32]
    assert all(seconds > 0 for _, seconds in timings)


def test_warm_up_stays_within_the_context() -> None:
    target = TransformersTarget(tiny_model("llama"), max_context=20)
    assert [n for n, _ in target.warm_up(steps=1)] == [1, 2, 4, 8]


def test_warm_up_needs_a_free_slot(target: TransformersTarget) -> None:
    step(target, [Client(str(i), [1, 2]) for i in range(3)], no_block)
    with pytest.raises(ContextOverflow, match="all 3 slots"):
        target.warm_up()


@pytest.mark.parametrize("packed", [False, True])
def test_memory_counts_weights_once_and_the_whole_buffer(packed: bool) -> None:
    model = tiny_model("llama")
    weights = sum(p.nbytes for p in model.parameters())
    output_layer = model.lm_head.weight.nbytes  # tied: its prepacked copy comes on top of the embedding
    target = TransformersTarget(model, slots=2, max_context=100, packed=packed)
    buffer = 3 * 2 * 2 * 2 * 128 * 12 * 4  # layers x (K, V) x slots x KV heads x columns x head size x bytes
    rotary = sum(b.nbytes for b in model.buffers())
    assert target.memory_bytes() == weights + rotary + buffer + (output_layer if packed else 0)
