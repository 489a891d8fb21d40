"""The paths that are made for GPUs: FlashAttention 2 and captured passes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from duo_ray.models.slot_attention import KV_CACHE_ATTENTION, Segment
from duo_ray.models.slot_cache import SlotRunner
from duo_ray.models.transformers import TransformersTarget, UnsupportedModel
from tests.models import flash_reference
from tests.models.tiny_transformers import own_greedy, own_logits, tiny_model
from tests.models.verifying import SHAPED, Client, random_blocks, random_ids, step

# --- FlashAttention 2 -------------------------------------------------------------------------------------------


def test_verdicts_by_flash_attention_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_reference)
    target = TransformersTarget(tiny_model("llama"), slots=3, max_context=200, flash_attention=True)
    clients = [Client(str(i), random_ids(n, seed=n)) for i, n in enumerate((5, 40, 150))]
    for i in range(8):
        step(target, clients[: 1 + i % 3], random_blocks(i))
    for client in clients:
        assert client.emitted == own_greedy(llama, client.prompt, len(client.emitted))


def test_a_model_without_flash_attention_is_refused_by_name() -> None:
    model = tiny_model("llama")
    model._supports_flash_attn = False
    with pytest.raises(UnsupportedModel, match=r"llama cannot be a target: .*FlashAttention 2.*sdpa"):
        TransformersTarget(model, flash_attention=True)


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3-window", "gpt2"])
def test_captured_passes_give_the_verdicts_of_uncaptured_ones(name: str) -> None:
    clients = []
    for graphs in (False, True):
        target = TransformersTarget(tiny_model(name).cuda(), slots=3, max_context=200, cuda_graphs=graphs)
        clients.append([Client(str(i), random_ids(n, seed=n), SHAPED) for i, n in enumerate((5, 40, 70))])
        for i in range(20):
            step(target, clients[-1][: 1 + i % 3], random_blocks(i))
    for plain, captured in zip(*clients, strict=True):
        assert captured.emitted == plain.emitted


@pytest.mark.gpu("flash_attn")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_the_package_flash_attn_gives_the_logits_of_eager_attention(name: str, graphs: bool) -> None:
    model = tiny_model(name, "eager", sharpness=1.0).to("cuda", torch.bfloat16)
    ids = [random_ids(n, seed=n) for n in (60, 33)]
    want = [own_logits(model, row).float() for row in ids]
    model.set_attn_implementation(KV_CACHE_ATTENTION)
    runner = SlotRunner(model, slots=4, max_context=200, graphs=graphs)
    with torch.inference_mode():
        runner.forward([Segment(0, 0, ids[0][:50], 1), Segment(3, 0, ids[1][:30], 1)])
        got = runner.forward([Segment(0, 50, ids[0][50:], 10), Segment(3, 30, ids[1][30:], 3)]).float()
    for row, count in enumerate((10, 3)):
        off = (got[row, :count] - want[row][-count:]).norm() / want[row][-count:].norm()
        assert off < 0.05
