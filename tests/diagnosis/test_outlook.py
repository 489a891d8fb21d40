"""What the simulation says of drafts that are plainly good or plainly useless."""

from __future__ import annotations

import json

import pytest

from duo_ray.diagnosis.outlook import BATCHES, GAMMAS, Batch, Outlook, look_ahead
from duo_ray.planning.scenario import InvalidScenario

TARGET = {"1": 0.08, "8": 0.085, "32": 0.11}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr("duo_ray.diagnosis.outlook._TOKENS", 128)
    monkeypatch.setattr("duo_ray.diagnosis.outlook._ANSWER_TOKENS", 64)
    monkeypatch.setattr("duo_ray.diagnosis.outlook.BATCHES", (1, 4))
    monkeypatch.setattr("duo_ray.diagnosis.outlook.GAMMAS", (1, 4, 16))


def look(draft: float, acceptance: float) -> Outlook:
    costs = {"target": TARGET, "draft": {"1": draft, "2": 1.3 * draft}, "overhead": 0.001}
    return look_ahead(costs, acceptance=acceptance, decided=1.0, prompt_tokens=16, draft_actors=1,
                      progress=lambda _text, share: shares.append(share))  # fmt: skip


shares: list[float] = []


def test_a_fast_and_good_draft_pays_and_progress_is_told():
    shares.clear()
    outlook = look(0.008, 0.95)
    assert outlook.auto > 2.0
    assert outlook.ratio == pytest.approx(10.0)
    assert outlook.stops_at != 1
    assert outlook.best_gamma > 1
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert 0.9 < shares[-1] < 1.0
    assert set(json.loads(json.dumps(outlook.as_dict()))) >= {"by_gamma", "by_batch", "best_gamma", "best_sequences"}


def test_a_draft_as_slow_as_the_target_that_is_mostly_wrong_never_pays():
    outlook = look(0.08, 0.2)
    assert outlook.auto < 1.02
    assert outlook.stops_at == 1
    assert outlook.gammas[16] < 1.0  # a fixed gamma is drafted whatever it costs


def test_half_the_time_or_half_the_misses_help():
    outlook = look(0.04, 0.6)
    assert outlook.faster > outlook.auto + 0.1
    assert outlook.better > outlook.auto + 0.1


def outlook_of(*speeds: float) -> Outlook:
    batches = tuple(Batch(size, speed, speed) for size, speed in zip(BATCHES, speeds, strict=False))
    return Outlook(speeds[0], 4.0, 2.0, dict.fromkeys(GAMMAS, 1.0), {1: 1.49, 2: 1.5, 4: 1.45}, batches, 2.0, 2.0, 9.0)


@pytest.mark.parametrize(
    ("speeds", "stops_at"), [((2.0, 1.5, 1.2), None), ((2.0, 0.9, 1.0), 2), ((2.0, 0.9, 1.1), None), ((1.0, 0.9), 1)]
)
def test_the_batch_where_it_stops_paying_is_the_first_of_those_that_all_do_not(speeds, stops_at):
    assert outlook_of(*speeds).stops_at == stops_at


def test_of_nearly_equal_numbers_of_sequences_the_fewest_are_best():
    assert outlook_of(1.5).best_sequences == 1


def test_costs_without_a_draft_are_refused():
    with pytest.raises(InvalidScenario, match="draft"):
        look_ahead({"target": TARGET, "overhead": 0.0}, acceptance=0.5, decided=1.0, prompt_tokens=1, draft_actors=1,
                   progress=lambda _text, _share: None)  # fmt: skip
