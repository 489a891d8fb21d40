"""Each rule: what it advises, with the figure that caused it, and that it is silent otherwise."""

from __future__ import annotations

import pytest

from duo_ray.diagnosis.advice import advise
from duo_ray.diagnosis.positions import Estimate
from tests.diagnosis.facts import FINE, facts


def test_where_no_figure_stands_out_nothing_is_to_be_changed():
    (advice,) = advise(FINE)
    assert "leave everything" in advice.what
    assert "2.00" in advice.because


@pytest.mark.parametrize(
    ("changes", "what", "because"),
    [
        ({"speedup": 0.9, "simulated": 0.95, "faster": 1.3, "better": 1.0}, "--no-draft", "1.30"),
        ({"speedup": 0.9, "simulated": 0.95, "faster": 1.0, "better": 1.0}, "--no-draft", "neither"),
        ({"shared_cores": True}, "hardware.cpu_affinity", "same core"),
        ({"busy": 0.45}, "hardware.cpu_affinity", "45%"),
        ({"speedup": 1.5}, "duo-ray doctor", "1.50 times the target alone measured, 2.00"),
        ({"overhead_share": 0.2}, "hardware.cpu_affinity", "20%"),
        ({"faster": 2.4, "idle_cores": 3}, "models.draft.threads=7", "3 cores are idle"),
        ({"faster": 2.4, "quant": "Q8_0"}, "models.draft.quant=Q4_0", "2.40"),
        ({"faster": 2.4}, "a smaller draft model", "80%"),
        ({"better": 2.4, "quant": "Q2_K"}, "Q4_K_M or Q8_0", "Q2_K"),
        ({"better": 2.4, "predicted": Estimate(0.5, 0.01, 1000)}, "another draft", "50%"),
        ({"better": 2.4}, "distil", "2.40"),
        ({"better": 2.4, "weakest": ("number", 0.4, 40)}, "'number'", "40% of 40"),
        ({"other_template": Estimate(0.9, 0.01, 1000)}, "models.draft.vocabulary=intersection", "90%"),
        (
            {"strategy": "intersection", "other_strategy": ("string", Estimate(0.9, 0.01, 1000))},
            "models.draft.vocabulary=string",
            "90%",
        ),
        ({"temperature": 1.5, "best_overlap": 0.85}, "sampled", "too sure"),
        ({"temperature": 0.6, "best_overlap": 0.85}, "sampled", "not sure enough"),
        ({"best_gamma": (4, 2.2)}, "optimization.draft_budget=4", "2.20"),
        ({"best_sequences": (2, 2.2, 2.0)}, "optimization.max_sequences=2", "2.20"),
        ({"stops_at": 4}, "fallback", "from 4 requests"),
        ({"measured": None}, "optimization.fallback=false", "only 0"),
        ({"measured": Estimate(0.0, 0.3, 2)}, "optimization.fallback=false", "only 2"),
        ({"measured": Estimate(0.5, 0.02, 500)}, "duo-ray check", "50% of 500"),
    ],
)
def test_a_figure_that_stands_out_is_the_reason_of_its_advice(changes, what, because):
    found = advise(facts(**changes))
    assert any(what in each.what and because in each.because for each in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"stops_at": 16},  # more than the pipeline has slots
        {"stops_at": 1, "slots": 8},  # said by the verdict
        {"temperature": 1.5},  # without anything to gain
        {"temperature": None, "best_overlap": 0.9},  # the draft is not sampled from
        {"measured": Estimate(0.6, 0.1, 20)},  # too few to tell
        {"speedup": 1.5, "tokens": 60},
        {"best_gamma": (4, 2.03)},
        {"faster": 2.4, "predicted": Estimate(0.7, 0.01, 1000)},  # the quality is in doubt rather than the size
    ],
)
def test_a_figure_that_means_nothing_causes_no_advice(changes):
    (advice,) = advise(facts(**changes))
    assert "leave everything" in advice.what
