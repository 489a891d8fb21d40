"""What counts as a tie between the draft's answer and the target's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from duo_ray.equivalence import compare
from duo_ray.session import Answer
from duo_ray.types import FinishReason, Origin, Request, SamplingParams, Token, TokenLogprobs

PROMPT = (1, 2, 3)


def token(id_: int, rival: int, gap: float) -> Token:
    return Token(id_, str(id_), Origin.PLAIN, 0, TokenLogprobs(-0.5, ((id_, -0.5), (rival, -0.5 - gap))))


def answer(*tokens: Token) -> Answer:
    return Answer("", tokens, FinishReason.LENGTH, len(PROMPT), len(tokens), {})


class Target:
    """Alone it writes 5 6, drafted 5 7; `gaps` are how far 7 is behind 6 when it computes that place again."""

    def __init__(self, dtype: str, gap: float, gaps: list[float]) -> None:
        self.pipeline = SimpleNamespace(info=SimpleNamespace(target=SimpleNamespace(dtype=dtype)))
        self._gap, self._gaps = gap, gaps
        self.texts: list[tuple[int, ...]] = []

    def request(self, prompt: str, **_options: object) -> Request:
        return Request("r", PROMPT, SamplingParams(temperature=0.0), 1, draft=False)

    def generate(self, prompt: str | Request, *, draft: bool = True, **_options: object) -> Answer:
        if isinstance(prompt, Request):
            self.texts.append(prompt.prompt)
            if prompt.prompt != (*PROMPT, 5):
                return answer(token(5, 9, 3.0))
            gap = self._gaps.pop(0) if len(self._gaps) > 1 else self._gaps[0]
            return answer(token(6, 7, gap) if gap >= 0 else token(7, 6, -gap))
        return answer(token(5, 9, 3.0), token(7, 6, self._gap) if draft else token(6, 7, self._gap))


def verdict(target: Target) -> str:
    return compare(target, "a", max_tokens=2).verdict  # type: ignore[arg-type]


def test_within_the_spacing_of_the_precision_two_logits_are_a_tie() -> None:
    target = Target("bfloat16", 0.125, [])
    assert verdict(target) == "tie"
    assert not target.texts


@pytest.mark.parametrize(("gaps", "expected"), [([0.375, 0.125, 0.5], "tie"), ([0.25, 0.375], "different"),
                                                ([-0.125, 0.25], "tie")])  # fmt: skip
def test_beyond_it_the_target_alone_shows_what_its_rounding_does(gaps: list[float], expected: str) -> None:
    target = Target("bfloat16", 0.375, gaps)
    assert verdict(target) == expected
    assert {len(text) for text in target.texts} == {1, 2, 3, 4}  # passes of one token, of several, of all


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-6), ("float32", 0.5)])
def test_float32_has_no_ties(dtype: str, gap: float) -> None:
    assert verdict(Target(dtype, gap, [0.0])) == "different"
