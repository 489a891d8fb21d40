"""What `duo-ray doctor` makes of what it finds."""

from __future__ import annotations

import dataclasses

import pytest

from duo_ray import doctor
from duo_ray.core.precision import Estimate
from duo_ray.hardware.load import sample_load


@pytest.mark.parametrize(("busy", "warned"), [(0.2, False), (0.9, True)])
def test_a_busy_machine_is_a_warning_and_no_problem(monkeypatch, busy, warned):
    load = sample_load(seconds=0.0)
    monkeypatch.setattr(doctor, "sample_load", lambda *_, **__: dataclasses.replace(load, cores=(busy, busy)))
    report = doctor.Report()
    doctor._machine(report)
    assert bool(report.warnings) is warned
    assert report.problems == []


def test_what_each_quantisation_of_the_draft_promises_is_shown():
    estimates = [Estimate("Q8_0", False, 0.03, 0.91, 0.8, 14.04), Estimate("Q4_0", True, 0.02, 0.8, 0.7, 16.5)]
    assert doctor._quantisations(estimates) == {
        "Q8_0": "T_draft 30.0 ms, acceptance 0.91, expected 14.0 tokens/s",
        "Q4_0": "T_draft 20.0 ms, acceptance 0.80, expected 16.5 tokens/s (in use)",
    }
