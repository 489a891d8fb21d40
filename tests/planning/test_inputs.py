"""Numbers as a user types them; the command itself."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from duo_ray.cli import app
from duo_ray.core.costs import Costs
from duo_ray.planning.inputs import read_curve, read_seconds
from duo_ray.types import DuoRayError


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr("duo_ray.planning.prediction.TOKENS", 200)


QUICK = ("--answer-tokens", "40", "--prompt-tokens", "8")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments, *QUICK])


@pytest.mark.parametrize(("text", "seconds"), [("25ms", 0.025), ("0.5 s", 0.5), ("800us", 0.0008)])
def test_seconds_have_units(text, seconds):
    assert read_seconds(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["25", "ms", "-3ms", "1h", ""])
def test_seconds_without_a_unit_are_refused_with_the_option_and_an_example(text):
    with pytest.raises(DuoRayError, match=r"--t-target.*25ms"):
        read_seconds(text, "--t-target")


def test_a_curve_is_one_number_or_several():
    assert read_curve("10ms", "--x", 0.1)(3) == pytest.approx(0.012)
    assert read_curve("1:10ms, 9:18ms", "--x", 0.1)(5) == pytest.approx(0.014)


@pytest.mark.parametrize("text", ["a:10ms", "0:10ms", "1:10ms,8", "0ms"])
def test_a_curve_that_is_none_is_refused(text):
    with pytest.raises(DuoRayError, match="--x"):
        read_curve(text, "--x", 0.1)


def test_plan_prints_schedules_and_the_best():
    done = run("--t-target", "25ms", "--t-draft", "4ms")
    assert done.exit_code == 0, done.output
    assert "target alone" in done.stdout
    assert "best:" in done.stdout


def test_plan_json_has_schedules_actors_best_and_capacity():
    done = run("--t-target", "25ms", "--t-draft", "4ms", "--concurrency", "2", "--rate", "1", "--json")
    plan = json.loads(done.stdout)
    assert plan["best"]["speedup"] > 1.0
    assert [row["draft_actors"] for row in plan["actors"]] == [1, 2]
    assert set(plan["capacity"]) == {"with_drafts", "target_alone"}


def test_plan_reads_what_doctor_measured_and_a_typed_number_goes_before_it(tmp_path):
    costs = Costs()
    costs.observe_target(1, 0.08)
    costs.observe_draft(1, 0.02)
    report = tmp_path / "doctor.json"
    report.write_text(json.dumps({"costs": costs.as_dict()}))
    measured, typed = (
        json.loads(run("--from", str(report), "--json", *more).stdout)["alone"]["tokens_per_s"]
        for more in ((), ("--t-target", "8ms"))
    )
    assert measured == pytest.approx(1 / 0.08, rel=0.1)
    assert typed > 5 * measured


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--t-target", "25ms"], ["--t-draft", "needed"]),
        (["--t-target", "25", "--t-draft", "4ms"], ["--t-target", "'25'"]),
        (["--t-target", "25ms", "--t-draft", "4ms", "--acceptance", "1.5"], ["acceptance=1.5"]),
        (["--from", "/nowhere.json"], ["/nowhere.json"]),
    ],
)
def test_a_wrong_number_is_one_line(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert all(word in done.output for word in words), done.output
    assert "Traceback" not in done.output


def test_a_report_without_measured_times_says_how_to_get_one(tmp_path):
    (tmp_path / "doctor.json").write_text('{"costs": null}')
    done = run("--from", str(tmp_path / "doctor.json"))
    assert "doctor --measure" in " ".join(done.output.split())
