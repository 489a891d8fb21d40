"""Real models along a text: a draft of the same weights, a coarse one, one of another family."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drafts import write_with_template
from duo_ray.actors.prepare import Prepared, prepare
from duo_ray.config import load_config
from duo_ray.diagnosis.measuring import Judged, Observed, Speed, Written
from duo_ray.diagnosis.scoring import Scores, Templates, score
from duo_ray.models.translating import examine
from duo_ray.types import SamplingParams

ROLES = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant:"
ANSWER = "Ice floats because it is less dense than water.\n\n1. Water expands by 9% when it freezes.\n2. A cube of ice"
COSTS = {"target": {"1": 0.08}, "draft": {"1": 0.02}, "overhead": 0.001}


def scored(draft: str, target: str = "demo", **settings: object) -> Scores:
    """Scores along one greedy and one sampled text, both written by hand, without a pipeline."""
    config = load_config(
        None,
        {
            "models.target.model": target,
            "models.draft.model": draft,
            "models.target.precision": "fp32",
            "models.target.max_seq_len": 256,
        }
        | settings,
    )
    prepared = prepare(config)
    try:
        return score(prepared, observed(prepared), lambda _text, _share: None)
    finally:
        prepared.claims.release()


def observed(prepared: Prepared) -> Observed:
    tokenizer = prepared.tokenizer
    prompt = tuple(tokenizer.chat([{"role": "user", "content": "Why does ice float on water?"}]))
    answer = tuple(tokenizer.encode_part(ANSWER))
    assert prepared.draft_path is not None
    match = examine(prepared.draft_path, prepared.files, prepared.settings.drafts[0].vocabulary)
    texts = (Written(prompt, answer, sampled=False), Written(prompt, answer, sampled=True))
    return Observed(texts, SamplingParams(temperature=0.7), Speed(1, 1.0), Speed(1, 1.0), Judged(), Judged(), COSTS,
                    match, ())  # fmt: skip


@pytest.mark.models
def test_a_draft_of_the_same_weights_has_the_targets_distribution_and_a_coarse_one_has_not():
    itself, coarse = scored("demo"), scored("demo", **{"models.draft.quant": "Q2_K"})
    same, other = (
        sum(each.divergence for each in scores.positions) / len(scores.positions) for scores in (itself, coarse)
    )
    assert 0.0 <= same < 0.02
    assert other > 10 * same
    assert itself.sampled.value > 0.95 > coarse.sampled.value
    assert itself.temperature.best == pytest.approx(1.0, abs=0.05)
    assert itself.temperature.overlap == pytest.approx(itself.sampled.value)
    for scores in (itself, coarse):
        assert len(scores.positions) == 2 * scores.used.agreement.count
        assert scores.shared_mass == pytest.approx(1.0, abs=1e-6)
        assert [view.strategy for view in scores.views] == ["same"]
        assert not scores.templates.differ
    assert coarse.quant == "Q2_K"


@pytest.mark.models
def test_a_draft_of_another_family_is_compared_in_the_common_vocabulary_and_by_text(gemma_gguf: Path):
    scores = scored(str(gemma_gguf))
    assert {(view.strategy, view.used) for view in scores.views} == {("intersection", True), ("string", False)}
    assert 0.9 < scores.shared_mass < 1.0
    assert all(0.0 <= each.variation <= 1.0 and 0.0 <= each.overlap <= 1.0 for each in scores.positions)
    # By hand, from its text: both families know that ice floats.
    assert all(0.3 < view.agreement.value < 1.0 for view in scores.views)
    assert scores.templates.draft is None
    assert "reads the target's" in scores.templates.describe()


@pytest.mark.models
def test_where_templates_differ_the_draft_is_tried_in_both(gemma_chat_gguf: Path):
    scores = scored(str(gemma_chat_gguf))
    assert scores.templates.differ
    assert "<start_of_turn>" in scores.templates.describe()
    assert "<|im_start|>" in scores.templates.describe()
    assert [(view.strategy, view.template, view.used) for view in scores.views] == [
        ("intersection", "own", True), ("string", "own", False), ("intersection", "target's", False),
    ]  # fmt: skip
    assert all(0.2 < view.agreement.value < 1.0 for view in scores.views)


@pytest.mark.models
def test_a_draft_of_the_same_family_with_another_template_is_tried_in_its_own(demo_gguf: Path, tmp_path: Path):
    write_with_template(demo_gguf, ROLES, tmp_path / "roles.gguf")
    scores = scored(str(tmp_path / "roles.gguf"))
    assert scores.templates.differ
    assert [(view.strategy, view.template, view.used) for view in scores.views] == [
        ("same", "target's", True), ("intersection", "own", False),
    ]  # fmt: skip
    assert all(0.2 < view.agreement.value < 1.0 for view in scores.views)
    assert scores.sampled.value > 0.95  # in the target's template the same weights say the same


def test_templates_that_differ_are_shown_where_they_part():
    found = Templates("<|im_start|>system\nBe kind<|im_end|>", "<|im_start|>user\nHow")
    assert found.differ
    assert "system" in found.describe()
    assert "user" in found.describe()
    assert not Templates("a", "a").differ
    assert "no chat template: prompts" in Templates(None, "a").describe()


@pytest.mark.models
def test_a_target_in_llama_cpp_is_compared_as_well():
    scores = scored("demo", **{"models.target.precision": "auto", "models.target.engine": "llama_cpp"})
    assert scores.sampled.value > 0.9
