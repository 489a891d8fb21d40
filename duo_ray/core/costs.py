"""What target and draft passes cost: curves over their width, learned from whatever passes occur.

Nothing here draws random numbers or reads a clock: the same observations give the same estimates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duo_ray.types import DraftBlock

Array = NDArray[np.float64]

LARGEST = 64
"""No more than this many tokens are ever planned for one block or one lead."""

STRETCH_S = 0.04
"""Plain steps of a request alone are taken together for so long: a message between coordinator and target costs about a
millisecond, and whoever else comes waits for the end of it."""
_SHARERS = 6
"""So many steps share the overhead of a stretch, at most, to the estimates: probes interrupt longer ones."""

_WIDE = 8
"""Ids read by one draft call from which on its time tells something of decodes of many sequences."""

_WIDEST = 1024
"""Passes of many requests: the widest whose time is estimated."""

_NOISE = 0.1**2
"""Variance of one measured log-seconds."""
_LEVEL = 0.3**2
"""Variance, in log-seconds, of the whole curve: another load on the machine, a longer context."""
_SHAPE = 0.2**2
"""Variance of the curve's shape, per doubling of the width."""
_FIRST = 0.7**2
"""Variance, in log-seconds, of the step from a pass of one token to wider ones, which other kernels compute."""
_FIRST_STAYS = 0.02
"""Share of it that comes back: once known, all widths change together."""
_APART = 0.5**2, 0.2**2
"""The same two variances of the difference between passes with all cores and passes beside a draft."""
_APART_STAYS = 0.1
"""Share of these variances that comes back: once known, the two kinds of passes change together."""
_FORGET = 0.005
"""Share of what was known that one more observation makes doubtful again."""
_DRIFT = 0.03**2
"""Variance the level gains with every observation besides: it moves sooner than the shape."""


class _Curve:
    """Seconds of one pass as a function of its width, learned from noisy passes of whatever widths occur.

    A Kalman filter over log-seconds at widths that lie close together up to `dense` and 15% apart from there to
    `_WIDEST`; in between it is interpolated. Prior mean: a line, 1 + slope (n - 1). Prior covariance: a
    common level, plus a Brownian motion in log2(n), plus a step behind the first width. So a pass of one width moves
    the estimate of all (the machine got slower), its own and its neighbours' the most (the curve is concave there), and
    a width not seen lately follows the others.

    A pause of the process only ever makes a pass slower. So a value far above the estimate is set aside; the third in a
    row is believed, at once and for all widths. A value far below is believed immediately.

    Passes of a second kind, `alone`, have a curve of their own from the first one on, which begins as the other one and
    shares its level: when passes of either kind become slower, so do the estimates of the other.
    """

    def __init__(self, dense: int, slope: float) -> None:
        steps = math.ceil(math.log(_WIDEST / dense, 1.15))
        widths = np.concatenate([np.arange(1.0, dense), np.geomspace(dense, _WIDEST, steps + 1)])
        doublings = np.log2(widths)
        self._mean = np.log1p(slope * (widths - 1))
        first = _FIRST * np.outer(widths > 1.0, widths > 1.0)
        smooth = _LEVEL + _SHAPE * np.minimum(doublings[:, None], doublings[None, :])
        self._prior, self._covariance = smooth + _FIRST_STAYS * first, smooth + first
        self._apart = _APART[0] + _APART[1] * np.minimum(doublings[:, None], doublings[None, :])
        self._jump: Array = np.ones_like(self._prior)
        self._slow_in_a_row = {False: 0, True: 0}  # by kind
        self._widths = widths
        self._rising: Array | None = None  # estimates at all widths, until the next observation
        self.seen: tuple[int, ...] = ()
        self.seen_alone: tuple[int, ...] = ()

    def observe(self, width: int, seconds: float, *, alone: bool = False) -> None:
        # Spans come from a wall clock, which may be set back.
        if not (0.0 < seconds < math.inf and 1 <= width <= _WIDEST):
            return
        self._rising = None
        above = int(np.searchsorted(self._widths, width))
        below = max(0, above - 1)
        share = (self._widths[above] - width) / (self._widths[above] - self._widths[below]) if above else 0.0
        if not (self.seen or self.seen_alone):
            self._mean = self._mean + math.log(seconds) - self._between(self._mean, below, above, share)
        if alone:
            if len(self._mean) == len(self._widths):
                self._part()
            above, below = above + len(self._widths), below + len(self._widths)
        surprise = math.log(seconds) - float(self._between(self._mean, below, above, share))
        # Level and shape have drifted since: less is known than before.
        covariance = (1.0 - _FORGET) * self._covariance + (_FORGET * self._prior + _DRIFT)
        row = self._between(covariance, below, above, share)
        variance = float(self._between(row, below, above, share))
        if abs(surprise) > max(math.log(1.5), 3.0 * math.sqrt(variance + _NOISE)):
            slow = self._slow_in_a_row[alone] + (surprise > 0.0)
            self._slow_in_a_row = {**self._slow_in_a_row, alone: slow}
            if surprise > 0.0 and slow < 3:
                return
            covariance = self._prior + self._jump
            row = self._between(covariance, below, above, share)
            variance = float(self._between(row, below, above, share))
        self._slow_in_a_row = {**self._slow_in_a_row, alone: 0}
        gain = row / (variance + _NOISE)
        self._mean = self._mean + gain * surprise
        self._covariance = covariance - np.outer(gain, row)
        if alone and width not in self.seen_alone:
            self.seen_alone = (*self.seen_alone, width)
        elif not alone and width not in self.seen:
            self.seen = (*self.seen, width)

    def _part(self) -> None:
        """Give passes of the second kind a curve of their own, behind the other one."""
        apart = np.kron(np.diag([0.0, 1.0]), self._apart)
        self._mean = np.tile(self._mean, 2)
        self._covariance = np.tile(self._covariance, (2, 2)) + apart
        self._prior = np.tile(self._prior, (2, 2)) + _APART_STAYS * apart
        self._jump = np.tile(self._jump, (2, 2)) + np.kron(np.diag([0.0, 1.0]), self._jump)

    def join(self) -> None:
        """Forget the passes of the second kind."""
        if self.seen_alone:
            count = len(self._widths)
            self._mean, self._covariance = self._mean[:count], self._covariance[:count, :count]
            self._prior, self._jump = self._prior[:count, :count], self._jump[:count, :count]
            self.seen_alone, self._rising = (), None

    @staticmethod
    def _between(values: Array, below: int, above: int, share: float) -> Array:
        """`values` along their first axis at a width between two, `share` of the way back from the one above."""
        return np.asarray(values[above] if share == 0.0 else share * values[below] + (1.0 - share) * values[above])

    def seconds(self, widths: Array | float, *, alone: bool = False) -> Array:
        """Estimates at fractional `widths` of any shape, never falling, constant beyond the largest."""
        if self._rising is None:
            self._rising = np.maximum.accumulate(np.exp(self._mean.reshape(-1, len(self._widths))), axis=1)
        return np.asarray(np.interp(widths, self._widths, self._rising[-1 if alone else 0]))

    def copy(self) -> _Curve:
        twin = _Curve.__new__(_Curve)
        twin.__dict__.update(self.__dict__)  # no attribute is ever changed in place
        return twin


class _Overhead:
    """Seconds of a step beside both models' work, and what a step that drafts has more of that than a plain one.

    Steps of both kinds tell the level. What drafting adds is learned only where steps of the two kinds follow each
    other in one request: at other times the machine may have been another one.
    """

    _KEPT, _ENOUGH = 15, 3

    def __init__(self) -> None:
        self._levels: deque[float] = deque(maxlen=self._KEPT)
        self._extras: deque[float] = deque(maxlen=self._KEPT)
        self._last: tuple[bool, float] | None = None

    @classmethod
    def known(cls, plain: float, drafting: float) -> _Overhead:
        """Of both kinds of steps, from earlier measurements."""
        overhead = cls()
        overhead._levels.append(plain)
        overhead._extras.extend([drafting - plain] * cls._ENOUGH)
        return overhead

    def observe(self, seconds: float, *, drafting: bool, follows: bool) -> None:
        if follows and self._last is not None and self._last[0] != drafting:
            more = seconds - self._last[1]
            self._extras.append(more if drafting else -more)
        self._last = drafting, seconds
        self._levels.append(seconds - self.extra * drafting)

    @property
    def both_known(self) -> bool:
        return len(self._extras) >= self._ENOUGH

    @property
    def extra(self) -> float:
        return max(0.0, median(self._extras)) if self.both_known else 0.0

    def seconds(self, *, drafting: bool) -> float:
        level = max(0.0, median(self._levels)) if self._levels else 0.0
        return level + self.extra * drafting

    def copy(self) -> _Overhead:
        twin = _Overhead()
        twin._levels, twin._extras, twin._last = self._levels.copy(), self._extras.copy(), self._last
        return twin


class Costs:
    """Measured seconds, shared by all requests of a pipeline. Recent values weigh more; outliers are damped.

    Until something was measured, the target is taken for 5 times as slow as the draft.

    `alone` everywhere: of target passes beside which no draft works, where these may have more cores. They take no
    longer than others.
    """

    _ASSUMED_TARGET = 0.05
    _ASSUMED_RATIO = 5.0

    def __init__(self) -> None:
        self._target = _Curve(dense=LARGEST + 1, slope=0.015)
        self._draft = _Curve(dense=LARGEST // 2, slope=0.3)
        self._overhead = _Overhead()
        self._is_frozen = False

    def observe_target(self, tokens: int, seconds: float, *, alone: bool = False) -> None:
        """One target pass over `tokens` new tokens; more than 1024 teach nothing."""
        if not self._is_frozen:
            self._target.observe(tokens, seconds, alone=alone)

    def drop_alone(self) -> None:
        """The target has no more cores while no draft works than else, from now on."""
        if not self._is_frozen:
            self._target.join()

    def observe_draft(self, width: int, seconds: float) -> None:
        """One draft decode that advanced `width` sequences by one token; more than 1024 teach nothing."""
        if not self._is_frozen:
            self._draft.observe(width, seconds)

    def observe_call(self, blocks: Sequence[DraftBlock]) -> None:
        """The decodes of one draft call, which these blocks took part in."""
        longest = max(blocks, key=lambda block: len(block.token_seconds))
        for width, seconds in longest.token_seconds:
            self.observe_draft(width, seconds)
        # Ids of one text are read about as fast as ids of many are advanced.
        read = sum(block.prompt_tokens for block in blocks)
        if read >= _WIDE:
            self.observe_draft(read, max(block.prompt_seconds for block in blocks))

    def observe_overhead(self, seconds: float, *, drafting: bool, follows: bool = True) -> None:
        """Wall time of a step minus max(T_target, draft time); below zero counts as zero.

        Args:
            drafting: something was asked of the draft in it.
            follows: the one observed before was the step before, of the same request, and both were alone at work.
        """
        if not self._is_frozen and math.isfinite(seconds):
            self._overhead.observe(max(0.0, seconds), drafting=drafting, follows=follows)

    def target_seconds(self, tokens: float, *, alone: bool = False) -> float:
        """Estimate of T_target(tokens)."""
        return float(self.target_curve(tokens, alone=alone))

    def draft_seconds(self, width: float) -> float:
        """Estimate for one draft decode of `width` sequences."""
        return float(self.draft_curve(width))

    def overhead(self, *, drafting: bool) -> float:
        """Round overhead by the last ones, seconds: of a step in which the draft is asked for something, or is not."""
        return self._overhead.seconds(drafting=drafting)

    def all_cores_seconds(self, tokens: float) -> float | None:
        """Estimate of a pass on the drafts' cores, too, be it the faster or not; None where there is none."""
        return float(self._target.seconds(tokens, alone=True)) if self._target.seen_alone else None

    def stretch(self) -> int:
        """Plain steps that a request alone takes in one call of the target, so that they share its overhead: as many as
        fit into `STRETCH_S`. One by frozen costs, whose plans must not depend on others.
        """
        fitting = 1 if self._is_frozen else int(STRETCH_S / self.target_seconds(1, alone=True))
        return max(1, min(fitting, LARGEST))

    def plain_seconds(self) -> float:
        """Of a step of plain decoding of a request alone, with its share of what a stretch of them costs besides."""
        return self.target_seconds(1, alone=True) + self.overhead(drafting=False) / min(self.stretch(), _SHARERS)

    @property
    def both_overheads_known(self) -> bool:
        """Whether steps of both kinds have followed each other a few times, or cannot teach anything any more."""
        return self._is_frozen or self._overhead.both_known

    def target_curve(self, tokens: Array | float, *, alone: bool = False) -> Array:
        """`target_seconds` for an array of token counts, fractions allowed."""
        curve = self._target.seconds(tokens)
        if alone and self._target.seen_alone:  # more cores need not be used
            curve = np.minimum(curve, self._target.seconds(tokens, alone=True))
        if self._target.seen or self._target.seen_alone:
            return curve
        known = self._ASSUMED_RATIO * self._draft.seconds(1.0) if self._draft.seen else self._ASSUMED_TARGET
        return np.asarray(curve * known)

    def draft_curve(self, width: Array | float) -> Array:
        """`draft_seconds` for an array of widths, fractions allowed."""
        curve = self._draft.seconds(width)
        if self._draft.seen:
            return curve
        known = self._target.seconds(1.0) if self._target.seen else self._ASSUMED_TARGET
        return np.asarray(curve * known / self._ASSUMED_RATIO)

    def other_draft(self) -> Costs:
        """Costs of another draft beside the same target: what either learns of the target and overhead, both know."""
        twin = Costs()
        twin._target, twin._overhead = self._target, self._overhead
        return twin

    def frozen(self) -> Costs:
        """A copy that ignores further observations: the schedule of a reproducible request rests on it."""
        twin = Costs()
        twin._target, twin._draft = self._target.copy(), self._draft.copy()
        twin._overhead = self._overhead.copy()
        twin._is_frozen = True
        return twin

    def as_dict(self) -> dict[str, Any]:
        """Estimates at powers of two among the widths seen and at the widest, for JSON.

        {"target": {"1": s, ...}, "alone": {...}, "draft": {...}, "overhead": s, "overhead_drafting": s}
        """
        return {
            "target": {str(n): self.target_seconds(n) for n in _telling(self._target.seen)},
            "alone": {str(n): self.target_seconds(n, alone=True) for n in _telling(self._target.seen_alone)},
            "draft": {str(n): self.draft_seconds(n) for n in _telling(self._draft.seen)},
            "overhead": self.overhead(drafting=False),
            "overhead_drafting": self.overhead(drafting=True),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Costs:
        """What `as_dict` gave, taken as measured once.

        Raises:
            ValueError: the stored calibration is not what `as_dict` writes.
        """
        costs = cls()
        try:
            for tokens, seconds in stored["target"].items():
                costs.observe_target(int(tokens), float(seconds))
            for tokens, seconds in stored.get("alone", {}).items():
                costs.observe_target(int(tokens), float(seconds), alone=True)
            for width, seconds in stored["draft"].items():
                costs.observe_draft(int(width), float(seconds))
            plain = float(stored["overhead"])
            costs._overhead = _Overhead.known(plain, float(stored.get("overhead_drafting", plain)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"stored calibration {stored!r} cannot be read ({error!r}): delete it to measure anew"
            ) from error
        return costs


def _telling(widths: Sequence[int]) -> list[int]:
    """Of all these widths, as many as a curve needs."""
    return sorted(n for n in widths if n & (n - 1) == 0 or n == max(widths))
