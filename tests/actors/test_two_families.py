"""A target and a draft with different tokenizers in a running pipeline."""

from __future__ import annotations

import logging

import pytest

from duo_ray.config import load_config
from duo_ray.models.vocabulary import Strategy
from duo_ray.session import Duo
from tests.actors.conftest import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.models]

COUNT = 16
PROMPTS = ("Explain gravity to a child.", "1, 2, 4, 8, 16, 32,")


@pytest.fixture(scope="module")
def warnings():
    """What was logged while the pipeline started."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("duo_ray.session")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def mixed(gemma_gguf, warnings):
    settings = {**SMALL, "models.target.model": str(gemma_gguf), "models.target.slots": 2}
    with Duo(load_config(None, settings)) as running:
        yield running


def test_it_works_and_says_how(mixed, warnings):
    """Case 6."""
    (draft,) = mixed.pipeline.info.drafts
    assert draft.vocabulary.strategy is not Strategy.SAME
    (record,) = warnings
    assert f"models.draft.vocabulary: {draft.vocabulary.strategy}" in record.getMessage()
    assert draft.vocabulary.why in record.getMessage()


@pytest.mark.parametrize("max_sequences", [1, 4])
def test_greedy_ids_equal_the_targets_own(mixed, max_sequences):
    """Case 8."""
    for prompt in PROMPTS:
        ask = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}
        drafted = mixed.generate(prompt, draft_budget=4, max_sequences=max_sequences, **ask)
        assert drafted.stats["draft_tokens"] > 0
        assert drafted.token_ids == mixed.generate(prompt, draft=False, **ask).token_ids


def test_the_same_seed_gives_the_same_text(mixed):
    ask = {"temperature": 1.0, "max_tokens": COUNT, "seed": 5, "ignore_eos": True}
    assert mixed.generate("Once", **ask).token_ids == mixed.generate("Once", **ask).token_ids
