"""One request, followed from its arrival to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from duo_ray.core.stats import RequestStats, StepTimes
from duo_ray.metrics.series import Ended
from duo_ray.metrics.tally import StepCounts, Tally
from duo_ray.types import FinishReason


class RequestMeter:
    """Follows one request, from its arrival to whatever end it takes: a context manager, so that none is missed."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._running = False
        self._reason: FinishReason | None = None
        self._wasted = 0
        self._seen = _Seen()
        self._last_output: float | None = None

    def __enter__(self) -> RequestMeter:
        self._arrived = self._tally.clock()
        self._tally.change_load(queued=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tally.change_load(running=-1) if self._running else self._tally.change_load(queued=-1)
        self._tally.ended(self._how(error), self._wasted)

    def _how(self, error: BaseException | None) -> Ended:
        if self._reason is not None:
            return Ended(self._reason)
        return Ended.ERROR if isinstance(error, Exception) else Ended.CANCELLED

    def admitted(self) -> None:
        """The request got its slot."""
        self._running = True
        self._tally.change_load(running=1, queued=-1)

    def finished(self, reason: FinishReason) -> None:
        self._reason = reason

    def step(self, stats: RequestStats, times: StepTimes | None = None) -> None:
        """The request went one step further; no times for its first, which is prefill."""
        now, before, seen = self._tally.clock(), self._seen, _Seen.of(stats)
        self._seen, self._wasted = seen, stats.wasted_tokens
        tokens, gap = seen.tokens - before.tokens, None
        if tokens:
            if self._last_output is None:
                self._tally.first_token(stats.prompt_tokens, (stats.first_token or now) - self._arrived)
            else:
                gap = now - self._last_output
            self._last_output = now
        counts = StepCounts(
            steps=seen.steps - before.steps,
            tokens=tokens,
            gamma=sum(stats.gamma_history[before.asked :]),
            drafted=seen.drafted - before.drafted,
            drafted_seconds=seen.drafted_seconds - before.drafted_seconds,
            accepted=seen.accepted - before.accepted,
            proposed=seen.proposed - before.proposed,
            kept=seen.kept - before.kept,
            blocks=stats.sequences_history[before.blocks :],
            plain_reason=next(
                (reason for reason, n in stats.reasons.items() if n > before.reasons.get(reason, 0)), None
            ),
        )
        self._tally.step(counts, times, gap)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request's running totals after a step."""

    steps: int = 0
    tokens: int = 0
    asked: int = 0
    drafted: int = 0
    drafted_seconds: float = 0.0
    accepted: int = 0
    proposed: int = 0
    kept: int = 0
    blocks: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: RequestStats) -> _Seen:
        return cls(
            steps=stats.target_steps,
            tokens=stats.completion_tokens,
            asked=len(stats.gamma_history),
            drafted=stats.draft_tokens,
            drafted_seconds=stats.drafted_seconds,
            accepted=stats.accepted_tokens,
            proposed=sum(stats.proposed_per_position),
            kept=sum(stats.accepted_per_position),
            blocks=len(stats.sequences_history),
            reasons=dict(stats.reasons),
        )
