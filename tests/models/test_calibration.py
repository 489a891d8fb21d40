"""What an earlier start measured is found again, and only by the same facts."""

import pytest

from duo_ray.core.costs import Costs
from duo_ray.models.calibration import Calibration, calibration_file, read_calibration, write_calibration


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("duo_ray.models.calibration.cache_directory", lambda: tmp_path)


def measured():
    costs = Costs()
    for n, seconds in ((1, 0.08), (4, 0.085), (8, 0.09), (32, 0.12)):
        costs.observe_target(n, seconds)
    for width, seconds in ((1, 0.025), (2, 0.037), (4, 0.055)):
        costs.observe_draft(width, seconds)
    return costs


def test_costs_come_back_as_they_were_written():
    path = calibration_file("model", 1)
    written = measured().as_dict()
    write_calibration(path, Calibration("bfloat16", written))
    kept = read_calibration(path)
    assert kept is not None
    assert kept.dtype == "bfloat16"
    assert Costs.from_dict(kept.costs).as_dict() == Costs.from_dict(written).as_dict()
    assert Costs.from_dict(kept.costs).target_seconds(8) == pytest.approx(measured().target_seconds(8), rel=0.02)


def test_other_facts_lead_to_another_file():
    assert calibration_file("model", 1) != calibration_file("model", 2)
    assert calibration_file("model", 1) == calibration_file("model", 1)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"dtype": "bfloat16"}'])
def test_a_file_that_says_nothing_is_as_good_as_none(content):
    path = calibration_file("model")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_calibration(path) is None
