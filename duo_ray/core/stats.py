"""What one request cost and gained: the figures shown beside its answer."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from duo_ray.types import DraftBlock, Span


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one decode step, or of several plain ones that were taken at once."""

    target: float
    """The target pass that judged the request's block, beside those of others; or all passes."""
    overhead: float
    plain: float
    """Estimate: one plain pass over as many requests."""
    steps: int = 1


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, filled in as its steps happen. Times are seconds until `as_dict` shows milliseconds."""

    started: float
    """When the request came, seconds since the epoch."""
    queued_s: float = 0.0
    """How long it waited for a slot."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    judged_tokens: int = 0
    """Drafted tokens, heads apart, that the target looked at: those kept, and the first rejected one of a block."""
    kept_tokens: int = 0
    """How many of them were kept."""
    judged_heads: int = 0
    """How often the token after a fully kept block was one that heads bet on."""
    won_heads: int = 0
    """How often one of them won."""
    draft_quant: str | None = None
    """The quantisation of the draft that the request used; None: it had no draft."""
    proposed_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    gamma_history: list[int] = field(default_factory=list)
    sequences_history: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """How many steps went on without a draft, and why."""
    last_reason: str = ""
    """What the controller last said of drafting when it gave it up."""
    target_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens the target found in its cache."""
    draft_cached_tokens: int = 0
    completion_tokens: int = 0
    draft_losses: int = 0
    """How often the draft died or failed under this request."""
    target_losses: int = 0
    drafted_seconds: float = 0.0
    """What the drafted tokens took to write."""
    load: dict[str, float] = field(default_factory=dict)
    first_token: float | None = None
    ended: float | None = None
    _target_seconds: list[float] = field(default_factory=list)
    _overheads: list[float] = field(default_factory=list)
    _step_seconds: float = 0.0
    _draft_seconds: float = 0.0

    def verified(self, proposed: int, accepted: int, *, rejected: bool = False) -> None:
        """One target pass judged a block of `proposed` tokens; `rejected`: it refused the one after those accepted."""
        self.target_steps += 1
        self.judged_tokens += accepted + rejected
        self.kept_tokens += accepted
        missing = proposed - len(self.proposed_per_position)
        self.proposed_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(proposed):
            self.proposed_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted
        self.accepted_tokens += accepted

    def drafted(self, block: DraftBlock) -> None:
        """A draft block came back."""
        self.draft_tokens += block.drafted
        self.sequences_history.append(len(block.sequences))
        # A decode belongs to all sequences it advances, other requests' too. Its last token is not decoded.
        decoded = sum(width for width, _ in block.token_seconds)
        share = min(1.0, max(1, block.drafted - len(block.sequences)) / decoded) if decoded else 1.0
        self.drafted_seconds += share * (block.pace or 1.0) * sum(seconds for _, seconds in block.token_seconds)
        if block.prompt_tokens <= 2:  # the decode behind the first token; a prompt pass is not the cost of a token
            self.drafted_seconds += share * block.prompt_seconds

    def timed(
        self, wall: Span, target: Span, lead_seconds: float, overlapped_seconds: float, *, passes: int = 1
    ) -> float:
        """One decode step: its wall time, the target's pass, drafting before it (a lead) and beside it; or as many
        plain steps as there were `passes`.

        Returns the round overhead: what all of that took beyond the models' own work.
        """
        overhead = max(0.0, wall.seconds - lead_seconds - max(target.seconds, overlapped_seconds))
        self._step_seconds += wall.seconds
        self._target_seconds += [target.seconds / passes] * passes
        self._draft_seconds += lead_seconds + overlapped_seconds
        self._overheads += [overhead / passes] * passes
        return overhead

    @property
    def wasted_tokens(self) -> int:
        return self.draft_tokens - self.accepted_tokens

    def as_dict(self) -> dict[str, object]:
        """The `stats` object of the JSON output. Fractions are of the decode time (all steps after the first token)."""
        wall = self._step_seconds
        ended = self.ended if self.ended is not None else self.started
        first = self.first_token if self.first_token is not None else ended
        overheads = sorted(self._overheads) or [0.0]
        decoded = self.completion_tokens - 1
        return {
            "target_steps": self.target_steps,
            "cached_tokens": self.cached_tokens,
            "draft_cached_tokens": self.draft_cached_tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "wasted_tokens": self.wasted_tokens,
            "judged_tokens": self.judged_tokens,
            "kept_tokens": self.kept_tokens,
            "judged_heads": self.judged_heads,
            "won_heads": self.won_heads,
            "mean_accepted": round(self.accepted_tokens / self.target_steps, 3) if self.target_steps else 0.0,
            "acceptance_per_position": [
                round(accepted / proposed, 3)
                for accepted, proposed in zip(self.accepted_per_position, self.proposed_per_position, strict=True)
            ],
            "gamma_history": self.gamma_history,
            "sequences_history": self.sequences_history,
            "plain_steps": dict(self.reasons),
            "plain_reason": self.last_reason,
            "draft_quant": self.draft_quant,
            "draft_losses": self.draft_losses,
            "target_losses": self.target_losses,
            "t_target_ms": _ms(statistics.median(self._target_seconds)) if self._target_seconds else 0.0,
            "t_draft_ms": _ms(self.drafted_seconds / self.draft_tokens) if self.draft_tokens else 0.0,
            "queued_ms": _ms(self.queued_s),
            "ttft_ms": _ms(first - self.started),
            "decode_ms": _ms(ended - first),
            "tokens_per_s": round(decoded / (ended - first), 2) if decoded > 0 and ended > first else 0.0,
            "round_overhead_ms": {"p50": _ms(_quantile(overheads, 0.5)), "p90": _ms(_quantile(overheads, 0.9))},
            "target_idle": _idle(sum(self._target_seconds), wall),
            "draft_idle": _idle(self._draft_seconds, wall),
            "both_idle": round(sum(self._overheads) / wall, 3) if wall else 0.0,
            "load": self.load,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def _idle(busy: float, wall: float) -> float:
    return round(min(1.0, max(0.0, 1.0 - busy / wall)), 3) if wall else 0.0


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
