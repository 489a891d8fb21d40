"""Real models with different tokenizers, SmolLM2 and Gemma 3, each as the other's draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duo_ray.core.decode import decode
from duo_ray.core.gamma import Plan
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.translating import TranslatingDraft, adapt
from duo_ray.models.vocabulary import (
    Counterparts,
    Strategy,
    TokenizerVocabulary,
    VocabularyError,
    compare,
    tokens_per_token,
)
from duo_ray.types import SamplingParams
from tests.core.exactness import decoding
from tests.models.test_alignment import SLOW, TEXT, assert_proposed, assert_seen
from tests.prompts import PROMPTS

pytestmark = pytest.mark.models

PLAN = Plan(lead=2, gamma=5, overlap=True, reason="test")
COUNT = 16


@pytest.fixture(scope="module")
def vocabularies(demo_gguf: Path, demo_target: Path, gemma_gguf: Path, gemma_target: Path) -> Iterator[SimpleNamespace]:
    """Both models' vocabularies, as targets (tokenizer.json) and as drafts (GGUF)."""
    with LlamaVocabulary.open(demo_gguf) as smollm, LlamaVocabulary.open(gemma_gguf) as gemma:
        targets = [TokenizerVocabulary(Tokenizer.load(path)) for path in (demo_target, gemma_target)]
        pairs = {
            "gemma for smollm": (targets[0], gemma, Counterparts(targets[0], gemma)),
            "smollm for gemma": (targets[1], smollm, Counterparts(targets[1], smollm)),
        }
        yield SimpleNamespace(smollm=smollm, gemma=gemma, targets=targets, pairs=pairs)


DIRECTIONS = pytest.mark.parametrize("direction", ["gemma for smollm", "smollm for gemma"])


@DIRECTIONS
@given(parts=st.lists(TEXT, min_size=1, max_size=5), data=st.data())
@SLOW
def test_the_draft_sees_the_targets_text_however_it_grows_and_is_corrected(vocabularies, direction, parts, data):
    assert_seen(vocabularies.pairs[direction], parts, data)


@DIRECTIONS
@given(before=TEXT, written=TEXT, ended=st.booleans())
@SLOW
def test_what_is_proposed_is_what_the_draft_wrote(vocabularies, direction, before, written, ended):
    assert_proposed(vocabularies.pairs[direction], before, written, ended=ended)


def test_both_readings_of_a_model_encode_alike(vocabularies):
    for tokenizer, gguf in zip(vocabularies.targets, (vocabularies.smollm, vocabularies.gemma), strict=True):
        for text in PROMPTS:
            assert tokenizer.opening(text) == gguf.opening(text)


def test_a_models_own_vocabulary_is_the_same(vocabularies):
    for tokenizer, gguf in zip(vocabularies.targets, (vocabularies.smollm, vocabularies.gemma), strict=True):
        report, _ = compare(tokenizer, gguf)
        assert report.same, report.first_difference


def test_two_families_share_most_tokens_of_the_smaller_vocabulary(vocabularies):
    target, draft, _ = vocabularies.pairs["smollm for gemma"]
    report, _ = compare(target, draft)
    assert not report.same
    assert "id 0 is '<|endoftext|>' to the draft and '<pad>' to the target" in report.first_difference
    assert 0.9 * draft.size < report.shared <= draft.size
    assert report.draft_markers == ("<|im_start|>", "<|im_end|>")
    assert 0.8 < tokens_per_token(target, draft) < 1.2
    assert json.dumps(report.draft_markers)


@pytest.mark.parametrize("direction", ["gemma for smollm", "smollm for gemma"])
def test_greedy_ids_equal_the_targets_own_under_both_strategies(direction, demo_gguf, demo_target, gemma_gguf,
                                                                gemma_target):  # fmt: skip
    """What `benchmarks.exactness --drafts` does for 40 prompts, for the one with the most awkward characters."""
    from duo_ray.models.transformers import TransformersTarget

    path, gguf = (demo_target, gemma_gguf) if direction == "gemma for smollm" else (gemma_target, demo_gguf)
    target = TransformersTarget.load(path, slots=2, max_context=256)
    tokenizer = Tokenizer.load(path)
    prompt = tokenizer.chat([{"role": "user", "content": PROMPTS[31]}])

    def answer(draft=None, max_sequences=1):
        params = SamplingParams(temperature=0.0)
        run = decoding(params, PLAN, prompt=prompt, max_tokens=COUNT, max_sequences=max_sequences)
        for _ in decode(run, target, draft):
            pass
        return run.generation.token_ids

    alone = answer()
    for strategy in ("string", "intersection"):
        model = LlamaCppDraft.load(gguf, threads=1, max_context=512, slots=2, max_sequences=4)
        draft, match = adapt(model, tokenizer, strategy)
        assert match.strategy == strategy
        assert [answer(draft, max_sequences) for max_sequences in (1, 4)] == [alone, alone]
        model.close()


def test_auto_measures_and_says_why(demo_gguf, gemma_target):
    model = LlamaCppDraft.load(demo_gguf, threads=1, max_context=512, slots=1)
    try:
        draft, match = adapt(model, Tokenizer.load(gemma_target), "auto")
        assert isinstance(draft, TranslatingDraft)
        assert match.strategy is not Strategy.SAME
        assert 0 < match.mass <= 1
        assert f"{match.mass:.1%} of the draft's probability" in match.why
        assert "id 0 is" in match.describe()
        with pytest.raises(VocabularyError, match=r"is same, but id 0 is .* set it to auto"):
            adapt(model, Tokenizer.load(gemma_target), "same")
    finally:
        model.close()
