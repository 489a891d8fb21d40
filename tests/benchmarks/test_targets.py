"""Models of a set agreement agree as often as set, and agreement is counted token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shaped import Shape, write_shaped
from benchmarks.targets import agreement
from duo_ray.models.llama_cpp_target import LlamaCppTarget
from duo_ray.models.scripted import ScriptedTarget, random_table
from duo_ray.types import Context, SamplingParams, VerifyJob

TINY = Shape(layers=1, hidden=128, feed_forward=64, heads=4, kv_heads=2)


def written(target: LlamaCppTarget, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = prompt
    for i in range(count):
        job = VerifyJob(Context(f"{i}", 0, 0, ids, len(prompt)), (), SamplingParams(temperature=0.0))
        [verdict] = target.verify([job], [None]).verdicts
        assert verdict.token is not None
        ids = (*ids, verdict.token)
        target.release(f"{i}")
    return ids[len(prompt) :]


def test_a_shaped_draft_is_right_as_often_as_it_was_made(tmp_path: Path) -> None:
    always = LlamaCppTarget.load(write_shaped(tmp_path / "a.gguf", TINY, 1.0), threads=1, max_context=512)
    often = LlamaCppTarget.load(write_shaped(tmp_path / "b.gguf", TINY, 0.8), threads=1, max_context=512)
    answers = [written(always, (0, first), 60) for first in (100, 900, 2000)]
    assert all(
        agreement(always, (0, first), answer) == 1.0 for first, answer in zip((100, 900, 2000), answers, strict=True)
    )
    shares = [agreement(often, (0, first), answer) for first, answer in zip((100, 900, 2000), answers, strict=True)]
    assert sum(shares) / 3 == pytest.approx(0.8, abs=0.12)
    always.close()
    often.close()


def test_agreement_counts_each_token_once() -> None:
    target = ScriptedTarget(random_table(20, 0), 20)
    own = (3, 4)
    for _ in range(10):
        job = VerifyJob(Context(f"{len(own)}", 0, 0, own, 2), (), SamplingParams(temperature=0.0))
        token = target.verify([job], [None]).verdicts[0].token
        target.release(f"{len(own)}")
        assert token is not None
        own = (*own, token)
    assert agreement(target, own[:2], own[2:]) == 1.0
    wrong = (*own[2:6], (own[6] + 1) % 20)
    assert agreement(target, own[:2], wrong) == pytest.approx(4 / 5)
