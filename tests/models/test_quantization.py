"""Quantised targets: what they emit with blocks is what they emit token by token, in less memory."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
from transformers import LlamaConfig

from duo_ray.config import ConfigError
from duo_ray.core.context import IdLog
from duo_ray.models.memory import directory_memory
from duo_ray.models.quantization import check_quantization
from duo_ray.models.transformers import TransformersTarget
from duo_ray.types import Ids, SamplingParams, VerifyJob
from tests.models.tiny_transformers import VOCAB, sharp_model, tiny_model

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    sharp_model(config, "sdpa").save_pretrained(path)
    return path


def load(folder: Path, quantization: str) -> TransformersTarget:
    return TransformersTarget.load(folder, slots=1, max_context=120, quantization=quantization)


def written(target: TransformersTarget, largest_block: int) -> Ids:
    """Greedy text behind random blocks of up to so many tokens."""
    rng, log, agreed = random.Random(0), IdLog(PROMPT), 0
    while len(log) < len(PROMPT) + 40:
        block = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, largest_block)))
        context = log.context("a", agreed=agreed, prompt_length=len(PROMPT))
        [verdict] = target.verify([VerifyJob(context, block, SamplingParams(temperature=0.0))], [None]).verdicts
        assert verdict.token is not None
        agreed = len(log)
        log.extend((*block[: verdict.accepted], verdict.token))
    target.release("a")
    return tuple(log.ids[: len(PROMPT) + 40])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_blocks_leave_a_quantised_targets_greedy_text_unchanged(folder: Path, quantization: str) -> None:
    target = load(folder, quantization)
    assert written(target, largest_block=8) == written(target, largest_block=0)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_takes_less_memory_and_what_was_said(folder: Path, quantization: str) -> None:
    taken = load(folder, quantization).memory_bytes()
    assert taken < load(folder, "none").memory_bytes()
    said = directory_memory(folder, "float32", tokens=120, slots=1, packed=True, quantization=quantization).total
    assert said == pytest.approx(taken, rel=0.3)


@pytest.mark.parametrize(("quantization", "package"), [("int8", "torchao"), ("int4", "bitsandbytes")])
def test_a_missing_package_is_named(quantization: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_quantization(quantization)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"quantization is {quantization}, .* pip install {package}"):
        check_quantization(quantization)


def test_rows_that_four_bits_do_not_fit_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"int4, but model\.layers\.0\..* has \d+ rows, no multiple of 32: use int8"):
        load(tmp_path, "int4")
