"""Where generation ends: EOS, stop strings, length; cases 1-4 and 20 of the faults users reported elsewhere."""

import itertools

import pytest

from duo_ray.core.request import Generation
from duo_ray.types import FinishReason, Origin, Request, SamplingParams

EOS = 0


class Letters:
    """Id i is the i-th string of a list; "~" marks half a character that the next id completes."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.waiting = ""

    def push(self, token):
        text = self.waiting + self.pieces[token]
        if text.endswith("~"):
            self.waiting = text
            return ""
        self.waiting = ""
        return text.replace("~", "")


def generation(pieces, *, stop=(), max_tokens=100, ignore_eos=False):
    request = Request("r", (1,), SamplingParams(temperature=0), max_tokens, tuple(stop), ignore_eos)
    return Generation(request, eos_ids=frozenset({EOS}), detokenizer=Letters(pieces))


def run(gen, blocks):
    tokens = []
    for step, block in enumerate(blocks):
        tokens += gen.commit(tuple(block), Origin.ACCEPTED, step)
    return "".join(t.text for t in tokens), [t.id for t in tokens]


def splits(ids):
    """Every way to cut a list of ids into blocks."""
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        blocks, block = [], [ids[0]]
        for token, cut in zip(ids[1:], cuts, strict=True):
            if cut:
                blocks.append(block)
                block = []
            block.append(token)
        yield [*blocks, block]


def test_eos_inside_a_block_ends_there():
    gen = generation(["", "a", "b"])
    assert run(gen, [[1, 2, EOS, 1, 2]]) == ("ab", [1, 2, EOS])
    assert gen.finish_reason is FinishReason.STOP
    assert gen.token_ids == [1, 2, EOS]


def test_ignore_eos_goes_on_to_the_length():
    gen = generation(["", "a"], max_tokens=4, ignore_eos=True)
    assert run(gen, [[1, EOS, 1, 1, 1, 1]]) == ("aaa", [1, EOS, 1, 1])
    assert gen.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stop", ["cd", "bcd", "d", "cde", "abcdef"])
def test_a_stop_string_is_cut_at_its_first_match_for_every_split(stop):
    pieces = ["", "ab", "c", "de", "f", "abcdef"]
    ids = [1, 2, 3, 4, 5]
    whole = "abcdefabcdef"
    for blocks in splits(ids):
        gen = generation(pieces, stop=[stop])
        text, _ = run(gen, blocks)
        assert text == whole[: whole.index(stop)]
        assert gen.finish_reason is FinishReason.STOP


def test_nothing_after_the_stop_string_is_committed():
    gen = generation(["", "a", "X", "b"], stop=["X"])
    assert run(gen, [[1, 2, 3, 3]]) == ("a", [1, 2])
    assert gen.token_ids == [1, 2]


def test_the_earliest_of_several_stop_strings_wins():
    gen = generation(["", "one two three"], stop=["three", "two"])
    assert run(gen, [[1]])[0] == "one "


def test_text_that_may_begin_a_stop_string_is_held_back_then_released():
    gen = generation(["", "<", "end", "x"], stop=["<end>"])
    assert gen.commit((1,), Origin.PLAIN, 0) == []
    assert gen.commit((2,), Origin.PLAIN, 1) == []
    assert [t.text for t in gen.commit((3,), Origin.PLAIN, 2)] == ["<", "end", "x"]


def test_held_text_is_released_at_the_length_limit():
    gen = generation(["", "<"], stop=["<<<"], max_tokens=2)
    assert run(gen, [[1], [1]]) == ("<<", [1, 1])
    assert gen.finish_reason is FinishReason.LENGTH


def test_a_stop_string_on_the_last_allowed_token_is_a_stop():
    gen = generation(["", "a", "X"], stop=["X"], max_tokens=2)
    run(gen, [[1, 2]])
    assert gen.finish_reason is FinishReason.STOP


def test_length_before_a_stop_string_is_length():
    gen = generation(["", "a", "X"], stop=["X"], max_tokens=2)
    assert run(gen, [[1, 1, 2]]) == ("aa", [1, 1])
    assert gen.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_tokens_is_exact_inside_a_block(limit):
    gen = generation(["", "a"], max_tokens=limit)
    run(gen, [[1] * 8])
    assert len(gen.token_ids) == limit
    assert gen.remaining == 0


@pytest.mark.parametrize("end", [{"max_tokens": 2}, {}])
def test_half_a_character_at_the_end_is_not_shown(end):
    gen = generation(["", "a", "é~"], **end)
    text, ids = run(gen, [[1, 2, EOS]])
    assert (text, ids[:2]) == ("a", [1, 2])
    assert gen.finish_reason is not None


def test_half_a_character_is_held_back_and_the_token_keeps_its_origin():
    gen = generation(["", "~", "é"])
    first = gen.commit((1,), Origin.BONUS, 3)
    second = gen.commit((2,), Origin.ACCEPTED, 4)
    assert [(t.text, t.origin, t.step) for t in first + second] == [("", Origin.BONUS, 3), ("é", Origin.ACCEPTED, 4)]


def test_the_context_limit_lowers_max_tokens():
    request = Request("r", (1,), SamplingParams(), 10)
    gen = Generation(request, eos_ids=frozenset(), detokenizer=Letters(["", "a"]), max_tokens=3)
    run(gen, [[1] * 8])
    assert len(gen.token_ids) == 3
