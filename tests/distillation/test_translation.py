"""A target's answers in the tokens of a student that has other ones."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import normalizers

from duo_ray.distillation.data import TOP, Answer
from duo_ray.distillation.translation import Translator, translate_answers
from duo_ray.distillation.workspace import DistillationError
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import TokenizerVocabulary
from tests.models.tokenizers import byte_level, sentencepiece

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TARGET, STUDENT = (Tokenizer(make(), special=SPECIAL) for make in (byte_level, lambda: sentencepiece(start=False)))


def written(prompt: str, answer: str) -> Answer:
    """An answer whose target gives 0.5 to each token it wrote, and 0.25 to each of the next two ids."""
    ids = TARGET.encode(answer)
    top_ids = (np.array(ids)[:, None] + np.arange(TOP)) % TARGET.vocab_size
    top_probs = np.zeros((len(ids), TOP))
    top_probs[:, :3] = 0.5, 0.25, 0.25
    return Answer(np.array(TARGET.encode(prompt), np.int32), np.array(ids, np.int32), top_ids, top_probs.astype("f2"))


def text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    vocabulary = TokenizerVocabulary(tokenizer)
    return b"".join(vocabulary.piece(int(i)) for i in ids if int(i) != vocabulary.bos).decode()


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("the dog", " jumps over ab"), ("print(f(", "12)) and then"), ("日本", "語のテキスト"), ("a", "👩‍👩‍👧 naïve")],
)
def test_the_text_stays_the_same(prompt: str, answer: str) -> None:
    found = Translator(TARGET, STUDENT).translate(written(prompt, answer))
    assert found is not None
    assert text(STUDENT, found.prompt) == prompt
    assert text(STUDENT, found.answer) == answer


def test_what_the_target_thinks_is_known_where_tokens_of_both_begin_and_of_tokens_both_have() -> None:
    answer = written("the dog", " jumps over ab and then it jumps again")
    found = Translator(TARGET, STUDENT).translate(answer)
    assert found is not None
    ours, theirs = TokenizerVocabulary(TARGET), TokenizerVocabulary(STUDENT)
    begins, at = {}, 0
    for place, token in enumerate(answer.answer):
        begins[at] = place
        at += len(ours.piece(int(token)))
    common = {theirs.piece(i): i for i in range(theirs.size) if not theirs.is_special(i)}
    at = known = 0
    for row, token in enumerate(found.answer):
        given = {int(i): float(p) for i, p in zip(found.top_ids[row], found.top_probs[row], strict=True) if p}
        expected = {}
        if at in begins:
            place = begins[at]
            for i, p in zip(answer.top_ids[place], answer.top_probs[place], strict=True):
                piece = ours.piece(int(i))
                if p and not ours.is_special(int(i)) and piece in common:
                    expected[common[piece]] = float(p)
        assert given == expected
        known += bool(given)
        at += len(theirs.piece(int(token)))
    assert 0 < known < len(found.answer)


def test_answers_that_are_translated_already_are_kept(tmp_path) -> None:
    paths = []
    for number, words in enumerate(("jumps again", "the fox")):
        paths.append(tmp_path / f"{number}.npz")
        written("the", words).save(paths[-1])
    folder = tmp_path / "translated"
    translator = Translator(TARGET, STUDENT)
    found = translate_answers(paths, folder, translator, 512, lambda *_: None)
    assert [path.name for path in found] == ["0.npz", "1.npz"]
    before = found[0].stat().st_mtime_ns
    found[1].unlink()
    assert translate_answers(paths, folder, translator, 512, lambda *_: None) == found
    assert found[0].stat().st_mtime_ns == before
    with pytest.raises(DistillationError, match=r"none of 2 answers .* context of 3"):
        translate_answers(paths, tmp_path / "none", translator, 3, lambda *_: None)


def test_of_tokens_that_do_not_spell_the_text_only_the_first_has_a_place_in_it() -> None:
    """A student that composes characters before it splits them: where its tokens begin within a run is not known."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    answer = written("the dog", " naïve cafe\u0301")
    found = Translator(TARGET, Tokenizer(backend, special=SPECIAL)).translate(answer)
    assert found is not None
    known = found.top_probs.sum(-1) > 0
    assert known[0]
    assert not known[1:].any()
