"""Passes over slots against fresh forwards of the same model without any cache."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from duo_ray.models.packed import pack_linears
from duo_ray.models.slot_attention import (
    FOLDED_SDPA,
    KV_CACHE_ATTENTION,
    Segment,
    attention_masks,
    folded_sdpa,
    kv_cache_attention,
    layer_windows,
)
from duo_ray.models.slot_cache import SlotRunner
from tests.models import flash_reference
from tests.models.tiny_transformers import CONFIGS, VOCAB, own_logits, sharp_model, tiny_model

TOLERANCE = 1e-4  # correct passes differ by about 1e-5 here, any mask error by more than 0.1


OURS = {"folded": FOLDED_SDPA, "flash": KV_CACHE_ATTENTION}


@pytest.fixture(autouse=True)
def _flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package flash-attn, which needs a GPU, in plain torch."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_reference)


class Fuzzed:
    """Slots with known contents: every pass is compared with a fresh forward of the whole row."""

    def __init__(self, name: str, attention: str, slots: int, seed: int = 0) -> None:
        self.reference = tiny_model(name, "eager" if attention == "eager" else "sdpa")
        model = tiny_model(name, "eager" if attention == "eager" else "sdpa")
        if attention in OURS:
            model.set_attn_implementation(OURS[attention])
        self.runner = SlotRunner(model, slots=slots, max_context=200)
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.random = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    @torch.inference_mode()
    def run(self, blocks: dict[int, list[int]]) -> None:
        segments = [Segment(slot, len(self.held[slot]), ids, len(ids)) for slot, ids in sorted(blocks.items())]
        logits = self.runner.forward(segments)
        for rows, (slot, _, ids, keep) in zip(logits.split([s.keep for s in segments]), segments, strict=True):
            self.held[slot] += ids
            want = own_logits(self.reference, self.held[slot])[-keep:]
            torch.testing.assert_close(rows, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", ["folded", "flash", "sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_any_mix_of_blocks_and_crops_equal_a_fresh_forward(name: str, attention: str) -> None:
    fuzzed = Fuzzed(name, attention, slots=4)
    for start in range(0, 64, 16):  # prompts of different lengths, in chunks of 16
        prompts = {slot: fuzzed.ids(16)[: length - start] for slot, length in enumerate((5, 37, 64)) if length > start}
        fuzzed.run(prompts)
    for step in range(12):
        if step == 6:  # another request takes over the longest row
            fuzzed.held[2].clear()
        active = [slot for slot in range(3) if fuzzed.random.random() < 0.8] or [1]
        fuzzed.run({slot: fuzzed.ids(fuzzed.random.randint(1, 8)) for slot in active})
        for slot in active:
            held = fuzzed.held[slot]
            cut = fuzzed.random.choice([0, 1, 3, 7, 30])  # 30: far beyond the window
            del held[max(1, len(held) - cut) :]


@pytest.mark.parametrize("attention", OURS)
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_slots_that_are_not_neighbours_are_gathered(name: str, attention: str) -> None:
    fuzzed = Fuzzed(name, attention, slots=4)
    fuzzed.run({0: fuzzed.ids(20), 1: fuzzed.ids(9), 3: fuzzed.ids(30)})
    fuzzed.run({0: fuzzed.ids(2), 3: fuzzed.ids(5)})
    fuzzed.run({1: fuzzed.ids(1), 3: fuzzed.ids(1)})


@pytest.mark.parametrize("attention", OURS)
def test_rows_can_fill_the_whole_context(attention: str) -> None:
    fuzzed = Fuzzed("gpt2", attention, slots=2)
    fuzzed.run({0: fuzzed.ids(190), 1: fuzzed.ids(3)})
    fuzzed.run({0: fuzzed.ids(10), 1: fuzzed.ids(2)})


@pytest.mark.parametrize("attention", OURS)
def test_shapes_rounded_for_graphs_change_no_logits(attention: str) -> None:
    model = tiny_model("qwen2-window")
    model.set_attn_implementation(OURS[attention])
    plain, rounded = (SlotRunner(model, slots=3, max_context=200, graphs=graphs) for graphs in (False, True))
    fuzz = random.Random(1)
    for start in (0, 5, 10):
        ids = [fuzz.randrange(VOCAB) for _ in range(5)]
        segments = [Segment(0, start, ids, 3), Segment(2, start, ids[:3], 2)]
        flat, shape = rounded.prepare(segments)
        assert (shape.width, shape.keep, shape.keys) == (8, 4, 64)
        with torch.inference_mode():
            want, got = plain.forward(segments), rounded.call(flat, shape)
        for row, (segment, rows) in enumerate(zip(segments, want.split([3, 2]), strict=True)):
            torch.testing.assert_close(got[row, : segment.keep], rows, rtol=0, atol=TOLERANCE)


def test_passes_of_equal_shape_share_one_graph_key() -> None:
    runner = SlotRunner(tiny_model("llama"), slots=3, max_context=200, graphs=True)
    keys = {runner.prepare([Segment(1, start, [1] * n, n)])[1] for start, n in ((20, 5), (30, 7), (50, 8))}
    assert len(keys) == 1


def test_only_the_wanted_logits_are_computed() -> None:
    runner = SlotRunner(tiny_model("llama"), slots=1, max_context=200)
    with torch.inference_mode():
        assert runner.forward([Segment(0, 0, list(range(50)), 3)]).shape == (3, VOCAB)


def test_clearing_a_slot_removes_nan_that_masks_cannot() -> None:
    runner = SlotRunner(tiny_model("llama"), slots=1, max_context=100)
    with torch.inference_mode():
        want = runner.forward([Segment(0, 0, [1, 2, 3], 1)]).clone()
        for layer in runner.cache.layers:
            layer.buffers[0][0, :, 10] = torch.nan
        assert runner.forward([Segment(0, 0, [1, 2, 3], 1)]).isnan().any()
        runner.cache.clear(0)
        torch.testing.assert_close(runner.forward([Segment(0, 0, [1, 2, 3], 1)]), want, rtol=0, atol=0)


def test_mask_shows_a_query_its_window_and_nothing_later() -> None:
    masks = attention_masks(torch.tensor([[4, 5]]), 8, {"": 3}, torch.float32)
    assert isinstance(masks, torch.Tensor)
    assert (masks[0, 0] == 0).int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]


def test_models_with_layer_types_get_one_mask_per_type() -> None:
    assert layer_windows(CONFIGS["gemma3-window"]) == {"sliding_attention": 16, "full_attention": None}
    assert layer_windows(CONFIGS["mistral-window"]) == {"": 16}
    assert layer_windows(CONFIGS["gpt2"]) == {"": None}


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_attention_that_sdpa_cannot_compute_is_refused(name: str) -> None:
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match=f"{name}.*eager"):
        folded_sdpa(torch.nn.Identity(), x, x, x, torch.zeros(1, 1, 1, 1), **{name: 30.0})


@pytest.mark.parametrize("name", ["position_bias", "s_aux"])
def test_attention_that_flash_attention_cannot_compute_is_refused(name: str) -> None:
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match=f"{name}.*eager"):
        kv_cache_attention(torch.nn.Identity(), x, x, x, torch.ones(2, 1, 1, 1).int(), **{name: x})


def test_flash_attention_caps_scores_as_eager_attention_does() -> None:
    """Gemma 2's soft cap, which sdpa does not have."""

    def gemma2(cap: float | None) -> Any:
        config = Gemma2Config(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=16,
            max_position_embeddings=256, attn_logit_softcapping=cap, bos_token_id=None, eos_token_id=None,
            pad_token_id=None,
        )  # fmt: skip
        return sharp_model(config, "eager")

    ids = random.Random(3).choices(range(VOCAB), k=40)
    model = gemma2(cap=3.0)
    want = own_logits(model, ids)
    assert (own_logits(gemma2(cap=None), ids) - want).abs().max() > 100 * TOLERANCE  # the cap matters
    model.set_attn_implementation(KV_CACHE_ATTENTION)
    with torch.inference_mode():
        got = SlotRunner(model, slots=1, max_context=200).forward([Segment(0, 0, ids, len(ids))])
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_linears_give_the_plain_logits(name: str) -> None:
    plain, packed = tiny_model(name), tiny_model(name)
    pack_linears(packed)
    assert not [m for m in packed.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    ids = random.Random(2).choices(range(VOCAB), k=20)
    torch.testing.assert_close(own_logits(packed, ids), own_logits(plain, ids), rtol=0, atol=TOLERANCE)


def _full_mask(
    positions: torch.Tensor, keys: int, windows: dict[str, int | None], dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    return attention_masks(positions, keys, dict.fromkeys(windows), dtype)


def _shifted(key: int, window: int) -> Callable[..., torch.Tensor | dict[str, torch.Tensor]]:
    """A mask that sees `key` positions too far, with a window `window` too long."""

    def masks(
        positions: torch.Tensor, keys: int, windows: dict[str, int | None], dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        wider = {kind: None if size is None else size + key + window for kind, size in windows.items()}
        return attention_masks(positions + key, keys, wider, dtype)

    return masks


MUTATIONS: dict[str, tuple[Callable[..., object], Sequence[str]]] = {
    "window ignored": (_full_mask, ["qwen2-window", "mistral-window", "gemma3-window"]),
    "window one too long": (_shifted(0, 1), ["qwen2-window", "mistral-window", "gemma3-window"]),
    "window one too short": (_shifted(0, -1), ["qwen2-window", "mistral-window", "gemma3-window"]),
    "sees one key ahead": (_shifted(1, 0), list(CONFIGS)),
    "misses its own key": (_shifted(-1, 0), list(CONFIGS)),
}


@pytest.mark.parametrize(
    ("mutation", "name"), [(mutation, name) for mutation, (_, names) in MUTATIONS.items() for name in names]
)
def test_the_comparison_sees_a_wrong_mask(mutation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duo_ray.models.slot_attention.attention_masks", MUTATIONS[mutation][0])
    fuzzed = Fuzzed(name, "folded", slots=1)
    with pytest.raises(AssertionError):
        fuzzed.run({0: fuzzed.ids(40)})


def _reference_with(**changes: object) -> Callable[..., torch.Tensor]:
    def attend(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        return flash_reference.flash_attn_with_kvcache(*args, **{**options, **changes})

    return attend


@pytest.mark.parametrize(
    ("change", "name"),
    [({"window_size": (-1, -1)}, "gemma3-window"), ({"window_size": (16, 0)}, "mistral-window"),
     ({"causal": False}, "llama")],
)  # fmt: skip
def test_the_comparison_sees_wrong_flash_attention(
    change: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=_reference_with(**change)))
    fuzzed = Fuzzed(name, "flash", slots=1)
    with pytest.raises(AssertionError):
        fuzzed.run({0: fuzzed.ids(40)})
