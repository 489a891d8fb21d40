"""What coordinator and simulation ask about a round: who drafts, how much prompt is read, how long to wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.budget import Seat, draft_call_seconds
from duo_ray.core.costs import STRETCH_S, Costs
from duo_ray.core.gamma import GammaController, Plan, Policy
from duo_ray.core.round import RoundPlanner, prefill_chunk

T_TARGET, T_DRAFT = 1.0, 0.1


def costs() -> Costs:
    """A token more costs the target 10%, a sequence more the draft nothing."""
    measured = Costs()
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(20):
            measured.observe_target(tokens, T_TARGET * (1.0 + 0.1 * (tokens - 1)))
    for width in (1, 2, 4, 8):
        for _ in range(20):
            measured.observe_draft(width, T_DRAFT)
    return measured.frozen()


@dataclass
class Decoding:
    """As much of a request's decoding as a round looks at."""

    controller: GammaController
    gamma: int = 0
    behind: int = 0

    def seat(self, draft: object, *, busy: bool) -> Seat:
        return Seat(self.controller, 0, self.behind, draft, busy)


@dataclass(eq=False)
class Request:
    """Takes what it is told; on its own it drafts `own` tokens."""

    decoding: Any = field(default_factory=lambda: Decoding(GammaController(Policy(), costs(), Acceptance())))
    prefilling: bool = False
    shares_budget: bool = True
    waits_for_draft: bool = False
    draft: str = "draft-0"
    own: int = 0
    plan: Plan | None = None
    chunk: int = 0
    further: int = -1

    def begin_round(self, plan: Plan | None, chunk: int, further: int) -> bool:
        self.plan, self.chunk, self.further = plan, chunk, further
        self.decoding.gamma = self.own if plan is None else plan.gamma
        return plan is not None and plan.lead > 0


def planner(*, drafts: int = 1, chunk: int = 64) -> RoundPlanner[Request]:
    return RoundPlanner(Policy(), costs(), drafts=drafts, chunk=chunk)


def test_plain_steps_are_taken_together_only_while_nobody_else_waits_for_them() -> None:
    fast = Costs()
    fast.observe_target(1, STRETCH_S / 5.5)
    for rows, further in ((1, 4), (2, 0)):
        alone = Request()
        RoundPlanner(Policy(), fast, drafts=1, chunk=64).begin([alone], rows=rows, now=0.0)
        assert alone.further == further


# --- who does what


def test_a_request_alone_plans_for_itself() -> None:
    request = Request()
    assert planner().begin([request], rows=1, now=0.0) == []
    assert request.plan is None


def test_only_those_that_share_the_budget_are_planned_together() -> None:
    requests = [Request(), Request(shares_budget=False), Request()]
    leading = planner().begin(requests, rows=3, now=0.0)
    assert [request.plan is None for request in requests] == [False, True, False]
    assert leading == [request for request in requests if request.plan is not None and request.plan.lead > 0] != []


@pytest.mark.parametrize(("prefilling", "others", "learned"), [(False, 2, True), (True, 2, False), (False, 3, False)])
def test_only_two_ordinary_rounds_of_the_same_requests_are_compared(
    prefilling: bool, others: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed: list[float | None] = []
    rounds, crowd = planner(), [Request(prefilling=prefilling), *(Request() for _ in range(2))]
    plan = rounds._budget.plan
    monkeypatch.setattr(
        rounds._budget, "plan", lambda *args, **how: elapsed.append(how["elapsed"]) or plan(*args, **how)
    )
    rounds.begin(crowd[:3], rows=3, now=10.0)
    rounds.begin(crowd[: others + 1] if others < 3 else [*crowd, Request()], rows=3, now=12.5)
    assert elapsed == [None, 2.5 if learned else None]


# --- prefill


def test_a_prefill_beside_nobody_takes_the_configured_chunk() -> None:
    assert prefill_chunk(costs(), 64, prefilling=3, streaming=0) == 64


def test_beside_others_a_pass_with_the_prefill_takes_about_twice_as_long() -> None:
    chunk = prefill_chunk(costs(), 64, prefilling=1, streaming=2)
    assert costs().target_seconds(2 + chunk) == pytest.approx(2 * costs().target_seconds(2), rel=0.1)


def test_those_that_prefill_share_the_chunk_but_none_stands_still() -> None:
    one, two, many = (prefill_chunk(costs(), 1000, prefilling=n, streaming=20) for n in (1, 2, 50))
    assert two == one // 2
    assert many == 8


def test_every_request_of_a_round_is_told_the_same_chunk() -> None:
    requests = [Request(prefilling=True, shares_budget=False), Request()]
    planner().begin(requests, rows=2, now=0.0)
    assert [request.chunk for request in requests] == [prefill_chunk(costs(), 64, prefilling=1, streaming=1)] * 2


# --- waiting for a draft


def test_a_draft_call_takes_as_many_decodes_as_its_longest_block() -> None:
    known = costs()
    seconds = 3 * known.draft_seconds(2) + 2 * known.draft_seconds(1)
    assert draft_call_seconds(known, [(3, 1), (5, 1), (0, 9)], 1) == pytest.approx(seconds)
    assert draft_call_seconds(known, [], 1) == 0.0


def test_what_a_draft_has_to_read_first_makes_its_first_decode_wider() -> None:
    slower = Costs()
    for width, seconds in ((1, 0.1), (2, 0.2), (8, 0.8)):
        slower.observe_draft(width, seconds)
    seconds = slower.draft_seconds(8) + slower.draft_seconds(2)
    assert draft_call_seconds(slower, [(2, 5), (2, 3)], 1) == pytest.approx(seconds)


def test_wider_decodes_are_spread_over_the_draft_actors() -> None:
    slower = Costs()
    for width, seconds in ((1, 0.1), (2, 0.2), (4, 0.4)):
        slower.observe_draft(width, seconds)
    one, two = (draft_call_seconds(slower, [(1, 1)] * 4, drafts) for drafts in (1, 2))
    assert (one, two) == pytest.approx((slower.draft_seconds(4), slower.draft_seconds(2)))


def test_alone_a_block_may_take_half_as_long_again_as_it_should() -> None:
    assert planner().patience(costs(), 20, waited=0.5, rows=1) == pytest.approx(
        1.5 * 20 * costs().draft_seconds(1) - 0.5
    )


def test_alone_a_block_is_waited_for_as_long_as_a_plain_pass_would_take() -> None:
    assert planner().patience(costs(), 1, waited=100.0, rows=1) == costs().target_seconds(1)


def test_with_others_the_rounds_whole_draft_call_counts() -> None:
    rounds = planner()
    requests = [Request(shares_budget=False, own=own) for own in (12, 3)]
    rounds.begin([*requests, Request(shares_budget=False, own=50, prefilling=True)], rows=3, now=0.0)
    call = draft_call_seconds(costs(), [(12, 0), (3, 0)], 1)
    assert rounds.patience(costs(), 3, waited=0.1, rows=3) == pytest.approx(1.5 * call - 0.1)
    assert rounds.patience(costs(), 3, waited=100.0, rows=3) == costs().target_seconds(1) / 4


def test_a_lead_is_waited_for_longer_when_nobody_else_waits() -> None:
    quick = RoundPlanner[Request](Policy(), Costs(), drafts=1, chunk=64)  # assumed costs: 50 ms and 10 ms
    assert quick.lead_patience(Costs(), 2, rows=1) == 1.0
    assert quick.lead_patience(Costs(), 2, rows=2) == quick.patience(Costs(), 2, waited=0.0, rows=2) < 1.0
