"""What `duo-ray doctor` makes of what it finds."""

from __future__ import annotations

import dataclasses

import pytest

from duo_ray import doctor
from duo_ray.hardware.load import sample_load


@pytest.mark.parametrize(("busy", "warned"), [(0.2, False), (0.9, True)])
def test_a_busy_machine_is_a_warning_and_no_problem(monkeypatch, busy, warned):
    load = sample_load(seconds=0.0)
    monkeypatch.setattr(doctor, "sample_load", lambda *_, **__: dataclasses.replace(load, cores=(busy, busy)))
    report = doctor.Report()
    doctor._machine(report)
    assert bool(report.warnings) is warned
    assert report.problems == []
