"""A target and a draft with different tokenizers and chat templates in a running pipeline."""

from __future__ import annotations

import logging
from dataclasses import replace

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
def mixed(gemma_chat_gguf, warnings):
    settings = {**SMALL, "models.target.model": str(gemma_chat_gguf), "models.target.slots": 2}
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


def test_a_long_chat_is_the_targets_own_and_no_turn_is_read_twice(mixed):
    """Twelve turns after a system message, in either model's template."""
    chat = [{"role": "system", "content": "Answer in one word."}]
    for turn in range(11):
        chat += [{"role": "user", "content": f"What is {turn} + 1?"}, {"role": "assistant", "content": f"{turn + 1}"}]
    chat.append({"role": "user", "content": "What is 11 + 1?"})
    ask = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}
    # Reproducible: every block is waited for, however busy the machine.
    drafted = mixed.generate(replace(mixed.request(chat, draft_budget=4, **ask), reproducible=True))
    assert drafted.stats["draft_tokens"] > 0
    longer = [*chat, {"role": "assistant", "content": drafted.text}, {"role": "user", "content": "And 12 + 1?"}]
    next_turn = mixed.generate(longer, draft_budget=4, **ask)
    for cached in ("cached_tokens", "draft_cached_tokens"):
        assert next_turn.stats[cached] > 150
    for messages, answer in ((chat, drafted), (longer, next_turn)):
        assert answer.token_ids == mixed.generate(messages, draft=False, **ask).token_ids


def test_the_same_seed_gives_the_same_text(mixed):
    ask = {"temperature": 1.0, "max_tokens": COUNT, "seed": 5, "ignore_eos": True}
    assert mixed.generate("Once", **ask).token_ids == mixed.generate("Once", **ask).token_ids
