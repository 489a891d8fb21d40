"""A diagnosis made by hand, as text, JSON and HTML."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from duo_ray.diagnosis.advice import advise
from duo_ray.diagnosis.diagnosis import Acceptance, Diagnosis
from duo_ray.diagnosis.distances import Temperature
from duo_ray.diagnosis.measuring import Judged, Observed, Speed
from duo_ray.diagnosis.outlook import Batch, Outlook
from duo_ray.diagnosis.positions import Estimate, Kind, Position, by_kind, by_place, group
from duo_ray.diagnosis.scoring import Scores, Templates, View
from duo_ray.diagnosis.show import html_writer, show_diagnosis
from duo_ray.models.vocabulary import Strategy, VocabularyMatch, VocabularyReport
from duo_ray.types import DuoRayError, SamplingParams
from tests.diagnosis.facts import facts

HOSTILE = '<script>alert("draft")</script>'

POSITIONS = tuple(
    Position(place, kind, sampled=False, divergence=0.1 * place, variation=0.05, agrees=place % 3 > 0, overlap=0.8,
             confidence=0.6)
    for place, kind in enumerate((Kind.WORD, Kind.INSIDE, Kind.NUMBER, Kind.PUNCTUATION, Kind.SPACE, Kind.SPECIAL) * 3)
)  # fmt: skip


def made() -> Diagnosis:
    shared = VocabularyReport(10, 10, 10, None, 10, (), ())
    match = VocabularyMatch(shared, Strategy.SAME, "all ids of the target mean the same to the draft")
    agreement = Estimate(2 / 3, 0.1, 18)
    costs = {"target": {"1": 0.1}, "draft": {"1": 0.02}, "overhead": 0.005}
    observed = Observed((), SamplingParams(temperature=0.7), Speed(100, 10.0), Speed(100, 5.0), Judged(40, 60),
                        Judged(30, 60), costs, match, ())  # fmt: skip
    fit = Temperature(
        1.2, 0.3, 0.25, 0.7, 0.72, tuple((0.25 * 2 ** (i / 4), 0.3 + 0.01 * abs(i - 9)) for i in range(17))
    )
    views = (
        View("same", "target's", used=True, agreement=agreement),
        View("intersection", "own", used=False, agreement=Estimate(0.5, 0.1, 18)),
    )
    scores = Scores(POSITIONS, 1.0, fit, Estimate(0.8, 0.05, 18), views, Templates("<a>", "<b>"), "Q2_K")
    outlook = Outlook(1.9, 6.0, 2.0, {1: 1.2, 4: 1.8, 8: 1.7}, {1: 1.8, 2: 1.9, 4: 1.9},
                      (Batch(1, 1.9, 1.8), Batch(2, 1.3, 1.2), Batch(4, 1.0, 0.8)), 2.4, 2.3, 5.0)  # fmt: skip
    return Diagnosis(
        target="demo", draft=HOSTILE, texts=3, overall=group("all", POSITIONS), kinds=by_kind(POSITIONS),
        places=by_place(POSITIONS), greedy=Acceptance(agreement, observed.greedy.acceptance),
        sampled=Acceptance(scores.sampled, None), sampling_temperature=0.7, observed=observed, scores=scores,
        outlook=outlook, advice=advise(facts(faster=2.4, quant="Q8_0")),
    )  # fmt: skip


def test_the_text_has_the_verdict_every_section_and_each_advice_with_its_reason():
    out = io.StringIO()
    show_diagnosis(Console(file=out, width=120), made())
    text = out.getvalue()
    assert "speculation pays on this machine: 2.00 times the target alone" in text
    assert "stops paying at 4 requests at once" in text
    assert "predicted 66.7% ± 10.0% (of 18), measured in the pipeline 66.7%" in text  # 40 of 60 judged
    assert "sampled at 0.7: predicted 80.0% ± 5.0% (of 18), measured in the pipeline nothing" in text
    assert "1.20 times its temperature" in text
    assert "the chat templates differ" in text
    assert "models.draft.quant=Q4_0" in text
    assert "because the draft is Q8_0" in text


@pytest.mark.parametrize(
    ("speed", "batches", "words"),
    [
        (Speed(100, 20.0), (Batch(1, 0.9, 0.8),), "does not pay on this machine: 0.50 times .* at no batch size"),
        (Speed(100, 5.0), (Batch(1, 1.5, 1.5),), "pays on this machine: 2.00 times .* still pays with 1 requests"),
    ],
)
def test_the_verdict_says_whether_it_pays_and_with_how_many_requests(speed, batches, words):
    diagnosis = made()
    diagnosis = replace(
        diagnosis,
        observed=replace(diagnosis.observed, drafted=speed),
        outlook=replace(diagnosis.outlook, batches=batches),
    )
    assert re.search(words, diagnosis.verdict), diagnosis.verdict


def test_json_has_every_finding():
    found = json.loads(json.dumps(made().as_dict()))
    assert found["speed"]["speedup"] == 2.0
    assert found["speed"]["overhead_share"] == pytest.approx(0.05)
    assert found["acceptance"]["greedy"]["measured"]["count"] == 60
    assert found["distributions"]["all"]["tokens"] == 18
    assert found["simulated"]["stops_paying_at_batch"] == 4
    assert found["temperature"]["best"] == 1.2
    assert found["templates"]["differ"] is True
    assert [view["used"] for view in found["ways_to_use_the_draft"]] == [True, False]
    assert all(advice["because"] for advice in found["advice"])


def test_the_html_stands_alone_and_shows_names_as_text(tmp_path):
    path = tmp_path / "report.html"
    html_writer(path)(made())
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") == 6
    assert re.findall(r"""(?:src|href)=["'](?!#)""", page) == []  # nothing is loaded from elsewhere
    assert "url(http" not in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    hashed = [each for each in ids if re.search(r"[0-9a-f]{10}$", each)]
    assert len(hashed) == len(set(hashed)) > 0  # markers and clips of one plot are not another's
    assert "#010203" not in page
    assert "currentColor" in page


@pytest.mark.parametrize("name", ["nowhere/report.html", "."])
def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, name):
    with pytest.raises(DuoRayError, match="--html"):
        html_writer(tmp_path / name)


def test_without_matplotlib_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "duo_ray.diagnosis.html", None)
    with pytest.raises(DuoRayError, match=r"duo-ray\[bench\]"):
        html_writer(tmp_path / "report.html")
