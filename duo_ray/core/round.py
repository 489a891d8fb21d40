"""A round of several requests without I/O: what each of them does in it, and how long to wait for whom.

The coordinator asks with the clock's time, `planning.simulation` with a simulated one; both go by the same answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from duo_ray.core.budget import SharedBudget, draft_call_seconds
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import Plan, Policy
from duo_ray.core.step import Decoding

_LONGEST_PASS = 2.0
"""A pass with others' prefill may take this many times as long as one without."""
_SMALLEST_CHUNK = 8
"""Prompt tokens a request may always prefill in a round."""
_LATENESS = 1.5
"""A draft may take this many times as long as it should."""
_LEAD_ALONE = 1.0
"""Seconds a request alone waits for its lead at least."""


class Participant(Protocol):
    """A request, as its rounds see it."""

    @property
    def decoding(self) -> Decoding[Any]: ...

    @property
    def prefilling(self) -> bool:
        """Whether the target does not hold the whole prompt yet."""
        ...

    @property
    def shares_budget(self) -> bool:
        """Whether what this request drafts is decided together with what others do."""
        ...

    @property
    def waits_for_draft(self) -> bool:
        """Whether a block asked for in an earlier step has not come yet."""
        ...

    @property
    def draft(self) -> Hashable:
        """Which draft actor it uses."""
        ...

    def begin_round(self, plan: Plan | None, chunk: int, further: int) -> bool:
        """Start a step, unless a prefill goes on. True: it has a lead that the others wait for.

        Args:
            plan: what was decided together with others; None: the request decides for itself.
            chunk: prompt tokens it may prefill in this round.
            further: plain steps it may take at once with this one.
        """
        ...


P = TypeVar("P", bound=Participant)


class RoundPlanner(Generic[P]):
    """Plans the rounds of one pipeline. Draws no random numbers and reads no clock."""

    def __init__(self, policy: Policy, costs: Costs, *, drafts: int, chunk: int) -> None:
        """`drafts`: draft actors. `chunk`: prompt tokens of a prefill pass while nobody streams."""
        self._costs, self._drafts, self._chunk = costs, drafts, chunk
        self._budget = SharedBudget(policy, costs)
        self._began = 0.0
        self._ordinary: frozenset[P] = frozenset()
        """The requests of the round before; none if one of them was in its prefill."""
        self._draft_call = 0.0
        """Estimate of this round's draft call, seconds."""

    def begin(self, participants: Sequence[P], *, rows: int, now: float) -> list[P]:
        """Plan what each of these requests does in the round they begin together; returns those with a lead.

        Args:
            rows: requests of the pipeline, those included that are busy with something longer than a round.
            now: seconds of any clock.
        """
        sharing = [each for each in participants if each.shares_budget] if rows > 1 else []
        at_work = {each.draft for each in participants if each.waits_for_draft}
        seats = [each.decoding.seat(each.draft, busy=each.draft in at_work) for each in sharing]
        elapsed = now - self._began if self._ordinary == frozenset(participants) else None
        prefilling = sum(each.prefilling for each in participants)
        self._began, self._ordinary = now, frozenset(() if prefilling else participants)
        shared = self._budget.plan(seats, rows=rows, drafts=self._drafts, elapsed=elapsed, busy=bool(at_work))
        plans = dict(zip(sharing, shared, strict=True))
        chunk = prefill_chunk(self._costs, self._chunk, prefilling=prefilling, streaming=len(participants) - prefilling)
        further = self._costs.stretch() - 1 if rows == 1 else 0  # others would wait for its end
        leading = [each for each in participants if each.begin_round(plans.get(each), chunk, further)]
        writing = [each.decoding for each in participants if not each.prefilling]
        blocks = [(each.controller.usual_tokens(each.gamma), each.behind) for each in writing]
        self._draft_call = draft_call_seconds(self._budget.costs, blocks, self._drafts)
        return leading

    def patience(self, costs: Costs, budget: int, *, waited: float, rows: int) -> float:
        """Seconds to wait from now for a block that was asked for `waited` seconds ago.

        It has `budget` tokens of usual text; beside other requests, all that the round asks of the draft counts.

        `costs` are those of the request's own draft.

        Half as long again as they should take, and no less than a plain pass of a request alone: while one is waited
        for, the other could have been done. When others wait too (`rows` requests in all), a quarter of that.
        """
        pass_seconds = costs.target_seconds(1, alone=True)
        if rows == 1:
            return max(pass_seconds, _LATENESS * budget * costs.draft_seconds(1) - waited)
        return max(pass_seconds / 4, _LATENESS * self._draft_call - waited)

    def lead_patience(self, costs: Costs, budget: int, *, rows: int) -> float:
        """Seconds to wait for a lead of `budget` tokens that was asked for just now.

        Alone, nothing else could be done meanwhile, and after plain steps there is a stretch of context to read.
        """
        return max(_LEAD_ALONE if rows == 1 else 0.0, self.patience(costs, budget, waited=0.0, rows=rows))


def prefill_chunk(costs: Costs, largest: int, *, prefilling: int, streaming: int) -> int:
    """Prompt tokens each of `prefilling` requests may run in a round beside `streaming` others.

    While others stream, a pass with all of them takes about twice as long as one without.
    """
    if not (prefilling and streaming):
        return largest
    sizes = np.arange(1.0, largest + 1)
    limit = _LONGEST_PASS * costs.target_seconds(streaming)
    fits = int(np.searchsorted(costs.target_curve(streaming + sizes), limit))
    return max(_SMALLEST_CHUNK, fits // prefilling)
