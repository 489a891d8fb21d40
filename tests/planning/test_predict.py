"""Which schedule, how many draft actors, how many pipelines."""

from __future__ import annotations

import pytest

from duo_ray.planning import Curve, Hardware, Text, predict, required_capacity
from duo_ray.planning.scenario import InvalidScenario


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr("duo_ray.planning.prediction.TOKENS", 600)


def hardware(ratio, **others):
    return Hardware(Curve({1: 0.02}, growth=0.01), Curve({1: 0.02 / ratio}, growth=0.3), **others)


def by_name(prediction):
    return {each.name: each for each in prediction.schedules}


def test_a_good_fast_draft_pays_and_the_default_is_about_the_best():
    prediction = predict(hardware(8.0), Text(0.85, 16, 200))
    assert prediction.best.speedup > 2.0
    assert by_name(prediction)["auto"].tokens_per_s > 0.96 * prediction.best.tokens_per_s


def test_overlap_beats_taking_turns_where_both_take_equally_long():
    rows = by_name(predict(hardware(4.0), Text(0.9, 16, 200)))
    assert rows["auto"].tokens_per_s > 1.15 * rows["sequential"].tokens_per_s


def test_a_useless_draft_costs_next_to_nothing():
    assert by_name(predict(hardware(4.0), Text(0.05, 16, 200)))["auto"].speedup > 0.95


def test_more_requests_than_drafts_make_more_draft_actors_worth_it():
    prediction = predict(hardware(3.0), Text(0.9, 16, 60), concurrency=8)
    assert [each.draft_actors for each in prediction.actors] == [1, 2, 4, 8]
    assert prediction.actors[2].tokens_per_s > prediction.actors[0].tokens_per_s


def test_twice_the_load_needs_about_twice_the_pipelines():
    machine, text = hardware(6.0, slots=4), Text(0.8, 16, 60)
    small, large = (required_capacity(machine, text, rate=rate).pipelines for rate in (20.0, 40.0))
    assert 1.6 < large / small < 2.4


def test_drafts_save_gpus_and_cost_cores():
    machine, text = hardware(10.0, slots=2), Text(0.95, 16, 60)
    drafted, alone = (
        required_capacity(machine, text, rate=10.0, draft=draft, cores_per_actor=4) for draft in (True, False)
    )
    assert drafted.gpus < alone.gpus
    assert drafted.cpu_cores == 5 * drafted.pipelines
    assert alone.cpu_cores == alone.pipelines
    assert max(drafted.waiting_p95_s, alone.waiting_p95_s) <= 1.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InvalidScenario, match="rate"):
        required_capacity(hardware(4.0), Text(), rate=rate)
