"""What is simulated: hardware, text and traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from duo_ray.types import DuoRayError


class InvalidScenario(DuoRayError, ValueError):
    """A number that describes hardware, text or traffic is out of range; the text names it."""


class Curve:
    """Seconds of one pass by its width, from measured or assumed points.

    Between points it is linear, before the first and after the last it keeps the slope there.
    """

    def __init__(self, points: Mapping[int, float], *, growth: float = 0.0) -> None:
        """`growth`: share of the first point's seconds that each further unit of width adds, for a single point."""
        if not points or min(points) < 1 or not all(0.0 < s < math.inf for s in points.values()):
            raise InvalidScenario(
                f"{dict(points)} is no curve: give seconds above 0 for at least one width of 1 or more"
            )
        self.points = dict(sorted(points.items()))
        if len(self.points) == 1:
            ((width, seconds),) = self.points.items()
            self.points[width + 1] = seconds * (1.0 + growth)
        self._x, self._y = (np.array(list(v), dtype=np.float64) for v in (self.points.keys(), self.points.values()))

    def __call__(self, width: float) -> float:
        x, y = self._x, self._y
        if width > x[-1]:
            return float(y[-1] + max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) * (width - x[-1]))
        return float(np.interp(width, x, y))


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a pipeline runs on."""

    target: Curve
    """T_target(n): seconds of a pass over n new tokens, summed over the requests in it."""
    draft: Curve
    """T_draft(k): seconds of a decode that advances k sequences by one token."""
    alone: Curve | None = None
    """The same while no draft works, where the target has more cores then; None: no difference."""
    overhead: float = 0.002
    """Seconds of a step that are neither model's work."""
    overhead_drafting: float | None = None
    """The same of a step that drafts; None: no more."""
    draft_prompt: float | None = None
    """Seconds per prompt token the draft reads; None: an eighth of T_draft(1), beyond the widest decode known."""
    jitter: float = 0.05
    """Standard deviation of the logarithm of every pass's seconds."""
    draft_actors: int = 1
    slots: int = 8
    """Requests held at once; more wait."""
    chunk: int = 128
    """Prompt tokens of one target pass."""

    def draft_reads(self, ids: int) -> float:
        """Seconds of a decode that reads so many ids."""
        widest = max(self.draft.points)
        per_token = self.draft(1) / 8.0 if self.draft_prompt is None else self.draft_prompt
        return self.draft(min(ids, widest)) + max(0, ids - widest) * per_token

    @classmethod
    def from_costs(cls, stored: Mapping[str, Any], **others: Any) -> Hardware:
        """From what `Costs.as_dict` or `duo-ray doctor --json` measured; `others` are further fields.

        Raises:
            InvalidScenario: the costs lack times of the target or of the draft.
        """
        try:
            target, draft, alone = (
                {int(n): float(s) for n, s in each.items()}
                for each in (stored["target"], stored["draft"], stored.get("alone", {}))
            )
            overhead = float(stored["overhead"])
            drafting = float(stored.get("overhead_drafting", overhead))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidScenario(f"no measured times of target and draft ({error!r})") from None
        known: dict[str, Any] = {"target": Curve(target), "draft": Curve(draft, growth=0.3), "overhead": overhead}
        if "overhead" not in others:
            known["overhead_drafting"] = drafting
        if alone and "target" not in others:
            known["alone"] = Curve(alone)
        return cls(**(known | others))


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked and how well the draft knows the answers."""

    acceptance: float = 0.8
    """Chance that the draft's best guess at a position is the target's token."""
    prompt_tokens: int = 128
    answer_tokens: int = 256
    decided: float = 1.0
    """How the draft's probability of its best guess spreads around the acceptance (beta distribution with this many
    pseudo-counts): small for a draft that is sure here and clueless there, as language models are."""

    def __post_init__(self) -> None:
        checks = (
            ("acceptance", 0.0 < self.acceptance <= 1.0, "above 0, up to 1"),
            ("prompt_tokens", self.prompt_tokens >= 1, "1 or more"),
            ("answer_tokens", self.answer_tokens >= 1, "1 or more"),
            ("decided", self.decided > 0.0, "above 0"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise InvalidScenario(f"{name}={getattr(self, name)!r} is out of range: {allowed}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which requests come when."""

    requests: int = 8
    concurrency: int = 1
    """This many at a time, each followed by the next at once; ignored when `rate` is given."""
    rate: float | None = None
    """Requests per second on average, at random times (Poisson)."""
