"""The choice among quantisations of a draft, in a simulated world of hard and easy texts, busy and idle machines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from duo_ray.core.costs import Costs
from duo_ray.core.gamma import Policy
from duo_ray.core.precision import PrecisionChooser, Trial, best_rate

T_TARGET = 0.1
TOKENS = 128
"""Of every answer."""


@dataclass
class World:
    """What each quantisation is like, and how much texts differ (standard deviations, in log-odds of acceptance)."""

    quants: dict[str, tuple[float, float]]
    """T_draft in seconds and the acceptance of a token and of a head on a text of middling difficulty."""
    seed: int = 0
    texts: float = 0.6
    suits: float = 0.15
    """How much better a text suits one of them than another."""
    load: float = 1.0
    """Multiplies T_draft of all."""
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def chooser(self, policy: Policy | None = None) -> PrecisionChooser:
        """Warmed up: times are known, nothing of acceptance is."""
        costs = Costs()
        for tokens in (1, 2, 4, 8, 16, 32):
            for _ in range(5):
                costs.observe_target(tokens, T_TARGET * (1 + 0.01 * tokens))
        chooser = PrecisionChooser(list(self.quants), policy or Policy(), costs)
        for quant in self.quants:
            self._time(chooser, quant, 5)
        return chooser

    def compare(self, chooser: PrecisionChooser) -> None:
        """Short trials on one text."""
        difficulty = self.random.normal(0.0, self.texts)
        chooser.compare({quant: self._trial(self._chance(quant, difficulty), 64) for quant in self.quants})

    def serve(self, chooser: PrecisionChooser, requests: int) -> Served:
        used, seconds = [], []
        for _ in range(requests):
            difficulty = self.random.normal(0.0, self.texts)
            chances = {quant: self._chance(quant, difficulty) for quant in self.quants}
            quant = chooser.choose()
            self._time(chooser, quant, 8)
            chooser.observe(quant, self._trial(chances[quant], TOKENS))
            used.append(quant)
            seconds.append([TOKENS / self._rate(chooser, each, chances[each]) for each in self.quants])
        return Served(list(self.quants), used, np.array(seconds))

    def _chance(self, quant: str, difficulty: float) -> float:
        middling = self.quants[quant][1]
        odds = math.log(middling / (1 - middling)) - difficulty + self.random.normal(0.0, self.suits)
        return 1 / (1 + math.exp(-odds))

    def _trial(self, chance: float, tokens: int) -> Trial:
        judged, heads = round(0.7 * tokens), round(0.2 * tokens)
        kept, won = self.random.binomial([judged, heads], chance)
        return Trial(judged, int(kept), heads, int(won))

    def _time(self, chooser: PrecisionChooser, quant: str, decodes: int) -> None:
        for noise in self.random.normal(0.0, 0.05, decodes):
            chooser.knowledge[quant].costs.observe_draft(1, self.load * self.quants[quant][0] * math.exp(noise))

    def _rate(self, chooser: PrecisionChooser, quant: str, chance: float) -> float:
        costs = Costs()
        costs._target = chooser.knowledge[quant].costs._target
        costs.observe_draft(1, self.load * self.quants[quant][0])
        return best_rate(Policy(), costs, token=chance, head=chance)


@dataclass
class Served:
    quants: list[str]
    used: list[str]
    _seconds: np.ndarray
    """`[requests, quants]`: what each answer would have taken with each."""

    @property
    def best(self) -> str:
        """The best one for all, in hindsight."""
        return self.quants[int(self._seconds.sum(axis=0).argmin())]

    @property
    def excess(self) -> float:
        """Time beyond that of the best one, as a share of it."""
        taken = self._seconds[np.arange(len(self.used)), [self.quants.index(quant) for quant in self.used]].sum()
        return float(taken / self._seconds.sum(axis=0).min() - 1)

    def share(self, quant: str) -> float:
        return self.used.count(quant) / len(self.used)


FINE_WINS = {"Q8_0": (0.012, 0.9), "Q4_0": (0.011, 0.8), "Q2_K": (0.01, 0.6)}
COARSE_WINS = {"Q8_0": (0.06, 0.82), "Q4_0": (0.035, 0.8), "Q2_K": (0.015, 0.77)}
MIDDLE_WINS = {"Q8_0": (0.04, 0.86), "Q4_0": (0.02, 0.85), "Q2_K": (0.017, 0.6)}
WORLDS = pytest.mark.parametrize(
    ("quants", "best"), [(FINE_WINS, "Q8_0"), (COARSE_WINS, "Q2_K"), (MIDDLE_WINS, "Q4_0")]
)
SEEDS = range(8)


def found(quants: dict[str, tuple[float, float]], best: str, learn: Callable[[World, PrecisionChooser], object]) -> int:
    """In how many worlds the best is in use after `learn(world, chooser)`."""
    count = 0
    for seed in SEEDS:
        world = World(quants, seed)
        chooser = world.chooser()
        learn(world, chooser)
        count += chooser.in_use == best
    return count


@WORLDS
def test_the_best_is_found_within_sixty_requests_without_any_comparison(
    quants: dict[str, tuple[float, float]], best: str
) -> None:
    assert found(quants, best, lambda world, chooser: world.serve(chooser, 60)) >= len(SEEDS) - 1


@WORLDS
def test_a_comparison_at_the_start_finds_it_in_most_cases_at_once(
    quants: dict[str, tuple[float, float]], best: str
) -> None:
    assert found(quants, best, World.compare) >= 0.7 * len(SEEDS)


@WORLDS
def test_trying_others_and_errors_cost_little(quants: dict[str, tuple[float, float]], best: str) -> None:
    excesses = []
    for seed in SEEDS:
        world = World(quants, seed)
        chooser = world.chooser()
        world.compare(chooser)
        served = world.serve(chooser, 150)
        assert served.best == best
        excesses.append(served.excess)
    assert np.mean(excesses) < 0.03
    assert max(excesses) < 0.06


def test_where_all_are_alike_most_requests_keep_to_one() -> None:
    world = World({"Q8_0": (0.02, 0.8), "Q4_0": (0.02, 0.8)})
    chooser = world.chooser()
    world.compare(chooser)
    served = world.serve(chooser, 150)
    changes = sum(one != other for one, other in zip(served.used, served.used[1:], strict=False))
    assert changes < 0.5 * len(served.used)
    assert served.excess < 0.01


def test_what_is_far_worse_is_hardly_ever_tried() -> None:
    world = World({"Q8_0": (0.012, 0.9), "Q2_K": (0.012, 0.4)})
    chooser = world.chooser()
    world.compare(chooser)
    assert world.serve(chooser, 150).share("Q2_K") < 0.03


@pytest.mark.parametrize(
    ("before", "after", "requests"),
    [
        ({"Q8_0": (0.02, 0.85), "Q4_0": (0.02, 0.78)}, {"Q8_0": (0.02, 0.7), "Q4_0": (0.02, 0.85)}, 100),
        ({"Q8_0": (0.012, 0.88), "Q4_0": (0.01, 0.8)}, {"Q8_0": (0.06, 0.88), "Q4_0": (0.01, 0.8)}, 40),
    ],
    ids=["acceptance", "speed"],
)
def test_a_change_is_followed(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], requests: int
) -> None:
    followed = 0
    for seed in SEEDS:
        world = World(before, seed)
        chooser = world.chooser()
        world.compare(chooser)
        assert world.serve(chooser, 50).share("Q8_0") > 0.5
        world.quants = after
        world.serve(chooser, requests)
        followed += chooser.in_use == "Q4_0"
    assert followed >= len(SEEDS) - 1


def test_hard_texts_and_a_busy_machine_are_nobodys_fault() -> None:
    """All become slower and worse: without a common level the others would look better by comparison."""
    shares = []
    for seed in SEEDS:
        world = World({"Q8_0": (0.012, 0.92), "Q4_0": (0.011, 0.82)}, seed)
        chooser = world.chooser()
        world.compare(chooser)
        world.serve(chooser, 60)
        world.quants = {"Q8_0": (0.018, 0.75), "Q4_0": (0.0165, 0.53)}
        shares.append(world.serve(chooser, 30).share("Q8_0"))
    assert np.mean(shares) > 0.9


def test_one_that_is_left_aside_goes_by_the_present_load() -> None:
    world = World({"Q8_0": (0.012, 0.9), "Q2_K": (0.012, 0.3)})
    chooser = world.chooser()
    world.compare(chooser)
    world.load = 3.0
    world.serve(chooser, 40)
    fine, coarse = chooser.estimates()
    assert fine.draft_seconds == pytest.approx(0.036, rel=0.1)
    assert coarse.draft_seconds == pytest.approx(0.036, rel=0.2)


def test_alone_there_is_nothing_to_choose() -> None:
    chooser = PrecisionChooser(["Q4_1"], Policy(), Costs())
    chooser.compare({})
    assert [chooser.choose() for _ in range(3)] == ["Q4_1"] * 3
    chooser.observe("Q4_1", Trial(10, 5, 4, 2))
    (estimate,) = chooser.estimates()
    assert (estimate.quant, estimate.in_use) == ("Q4_1", True)


def test_a_request_that_drafted_nothing_teaches_nothing_of_any_quantisation() -> None:
    world = World(MIDDLE_WINS)
    chooser = world.chooser()
    world.compare(chooser)
    before = chooser.estimates()
    for _ in range(5):
        chooser.observe("Q8_0", Trial(0, 0, 0, 0))
    assert chooser.estimates() == before


def test_drafting_that_does_not_pay_is_worth_plain_decoding() -> None:
    costs = Costs()
    costs.observe_target(1, 0.1)
    costs.observe_draft(1, 0.5)
    assert best_rate(Policy(), costs, token=0.5, head=0.5) == pytest.approx(10.0)
    assert best_rate(Policy(fallback=False), costs, token=0.5, head=0.5) < 9.0
    assert best_rate(Policy(draft_budget=0), costs, token=0.9, head=0.9) == pytest.approx(10.0)
