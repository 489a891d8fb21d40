"""What two vocabularies have in common, and what is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from duo_ray.core.context import IdLog
from duo_ray.models.alignment import Alignment
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import (
    Counterparts,
    Strategy,
    TokenizerVocabulary,
    VocabularyError,
    VocabularyMatch,
    choose,
    compare,
    shared_mass,
)
from tests.models.tiny_gguf import write_tiny_llama
from tests.models.tokenizers import byte_level, sentencepiece, unigram, wordpiece


def vocabulary(backend: Backend, **options) -> TokenizerVocabulary:
    return TokenizerVocabulary(Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"}, **options))


def padded(backend: Backend, tokens: list[str]) -> TokenizerVocabulary:
    backend.add_tokens(tokens)
    return vocabulary(backend)


class TestCompare:
    def test_one_vocabulary_is_the_same_as_itself(self):
        report, counterparts = compare(vocabulary(byte_level()), vocabulary(byte_level()))
        assert report.same
        assert counterparts is None
        assert report.same_ids == report.shared == report.target_size

    def test_padding_of_the_draft_is_no_difference(self):
        """Case 5."""
        report, _ = compare(vocabulary(byte_level()), padded(byte_level(), ["[PAD1]", "[PAD2]"]))
        assert report.same
        assert report.draft_size == report.target_size + 2

    def test_a_token_that_the_draft_lacks_is_a_difference(self):
        report, counterparts = compare(padded(byte_level(), ["<tool>"]), vocabulary(byte_level()))
        assert "is not in use to the draft and '<tool>' to the target" in report.first_difference
        assert counterparts is not None
        assert report.shared == report.same_ids == report.draft_size

    def test_one_other_id_is_a_difference_by_name(self):
        report, _ = compare(padded(byte_level(), ["one"]), padded(byte_level(), ["two"]))
        assert "is 'two' to the draft and 'one' to the target" in report.first_difference

    def test_spellings_of_the_same_bytes_are_the_same_token(self):
        """Ġthe, ▁the and the are tokens of a byte-level, a Unigram and a WordPiece vocabulary."""
        target = vocabulary(byte_level())
        the = target.continuation(" the")
        for backend in (unigram(), wordpiece()):
            draft = vocabulary(backend)
            assert Counterparts(target, draft).to_target[draft.continuation(" the")].tolist() == the

    def test_special_tokens_match_special_tokens_only(self):
        target, draft = vocabulary(byte_level()), vocabulary(sentencepiece())
        counterparts = Counterparts(target, draft)
        assert counterparts.to_target[[1, 2, 3]].tolist() == [1, 2, 3]
        plain = padded(byte_level(), ["<|tool|>"])
        special = byte_level()
        special.add_special_tokens(["<|tool|>"])
        assert plain.size - 1 not in Counterparts(plain, vocabulary(special)).to_draft

    def test_the_end_of_a_text_is_the_end_whatever_its_name(self):
        ours = TokenizerVocabulary(Tokenizer(byte_level(), special={"eos_token": "<|user|>"}))
        theirs = TokenizerVocabulary(Tokenizer(byte_level(), special={"eos_token": "</s>"}))
        assert Counterparts(ours, theirs).to_draft[3] == 3
        backend = byte_level()
        backend.add_special_tokens(["<|end|>"])
        end = backend.token_to_id("<|end|>")
        theirs = TokenizerVocabulary(Tokenizer(backend, special={"eos_token": "<|end|>"}))
        plain = sentencepiece()
        plain.add_special_tokens(["<stop>"])
        ours = TokenizerVocabulary(Tokenizer(plain, special={"eos_token": "<stop>"}))
        assert Counterparts(ours, theirs).to_target[end] == plain.token_to_id("<stop>")

    @pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram, wordpiece])
    def test_counterparts_are_one_to_one_and_say_the_same(self, make):
        target, draft = vocabulary(byte_level()), vocabulary(make())
        counterparts = Counterparts(target, draft)
        assert len(counterparts.shared) > 20
        assert len(set(counterparts.to_target[counterparts.shared].tolist())) == len(counterparts.shared)
        for token in counterparts.shared.tolist():
            ours = int(counterparts.to_target[token])
            assert target.piece(ours) == draft.piece(token)
            assert counterparts.to_draft[ours] == token

    def test_text_is_matched_with_the_token_that_text_is_encoded_with_not_with_a_byte_token(self):
        target, draft = vocabulary(byte_level()), vocabulary(sentencepiece())
        (letter,) = draft.continuation("a")
        assert draft.piece(letter) == b"a"
        assert Counterparts(target, draft).to_target[letter] == target.continuation("a")[0]


@pytest.fixture(scope="module")
def report():
    return compare(vocabulary(byte_level()), vocabulary(sentencepiece()))[0]


class TestChoice:
    def test_auto_takes_tokens_where_they_carry_the_drafts_probability(self, report):
        match = choose("auto", report, lambda: 0.93, 1.2)
        assert match.strategy is Strategy.INTERSECTION
        assert "93.0%" in match.why

    def test_auto_takes_text_where_they_do_not(self, report):
        match = choose("auto", report, lambda: 0.4, 1.2)
        assert match.strategy is Strategy.STRING
        assert "40.0%" in match.why
        assert match.tokens_per_target_token == 1.2

    @pytest.mark.parametrize("wanted", ["string", "intersection"])
    def test_a_configured_strategy_is_taken(self, report, wanted):
        match = choose(wanted, report, lambda: 0.5, 1.0)
        assert match.strategy == wanted
        assert f"models.draft.vocabulary: {wanted}" in match.describe()

    def test_same_where_it_is_not_is_refused_with_the_way_out(self, report):
        with pytest.raises(VocabularyError, match=r"id 5 is '.*' to the draft .* set it to auto"):
            choose("same", report, lambda: 1.0, 1.0)

    def test_the_report_is_plain_data(self, report):
        shown = VocabularyMatch(report, Strategy.STRING, "as configured").as_dict()
        assert shown["strategy"] == "string"
        assert shown["common_tokens"] == report.shared

    def test_mass_is_the_mean_share_of_probability(self):
        rows = [np.log([0.5, 0.25, 0.25]), np.log([0.1, 0.2, 0.7])]
        assert shared_mass(rows, np.array([0, 2], np.int32)) == pytest.approx((0.75 + 0.8) / 2)


class TestStart:
    """Case 7: BOS once, markers and leading spaces as they are."""

    def seen(self, target, draft, ids):
        alignment = Alignment(target, draft, Counterparts(target, draft), lambda _prompt: None)
        alignment.receive(IdLog(ids).context("r", agreed=0, prompt_length=len(ids)))
        return list(alignment.draft_context("r").ids)

    @pytest.mark.parametrize("target_has_it", [True, False])
    @pytest.mark.parametrize("draft_has_it", [True, False])
    def test_each_side_has_its_own_bos_once(self, target_has_it, draft_has_it):
        ours = Tokenizer(sentencepiece(), special={"bos_token": "<s>"}, add_bos=target_has_it)
        theirs = vocabulary(byte_level(), add_bos=draft_has_it)
        ids = self.seen(TokenizerVocabulary(ours), theirs, ours.encode("ab abc"))
        assert ids == [*[1] * draft_has_it, *theirs.opening("ab abc")]

    def test_markers_survive(self):
        ours, theirs = Tokenizer(byte_level()), vocabulary(sentencepiece())
        ids = self.seen(TokenizerVocabulary(ours), theirs, ours.encode_part("<|user|>ab</s><|assistant|>"))
        assert ids == [3, *theirs.continuation("ab"), 2, 4]

    def test_a_marker_that_the_draft_lacks_is_spelled_out(self):
        backend = byte_level()
        backend.add_special_tokens(["<|tool|>"])
        ours, theirs = Tokenizer(backend), vocabulary(byte_level())
        ids = self.seen(TokenizerVocabulary(ours), theirs, ours.encode_part("a<|tool|>b"))
        assert b"".join(theirs.piece(token) for token in ids) == b"a<|tool|>b"
        assert not any(theirs.is_special(token) for token in ids)

    def test_markers_in_plain_text_stay_text(self):
        ours, theirs = Tokenizer(sentencepiece()), vocabulary(byte_level())
        ids = self.seen(TokenizerVocabulary(ours), theirs, ours.encode_spelled("ab</s>"))
        assert not any(theirs.is_special(token) for token in ids)
        assert b"".join(theirs.piece(token) for token in ids) == b"ab</s>"


def test_a_vocabulary_that_cannot_spell_every_text_is_refused_not_crashed_into(tmp_path):
    with LlamaVocabulary.open(write_tiny_llama(tmp_path / "tiny.gguf")) as theirs:
        assert theirs.piece(2) == "\u4e00".encode()
        with pytest.raises(LlamaCppError, match="lacks byte tokens"):
            theirs.continuation("a")
