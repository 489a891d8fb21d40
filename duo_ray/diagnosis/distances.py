"""How far the draft's distribution is from the target's, and what acceptance that allows.

A token drawn from q is kept with chance sum min(p, q) = 1 - TV(p, q), and no rule keeps more of them ("Fast Inference
from Transformers via Speculative Decoding", arXiv 2211.17192, theorem 3.5 and corollary 3.6). At temperature 0 both
distributions are one token each, and the same formula gives 1 where the two agree, 0 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MULTIPLIERS: Array = np.geomspace(0.25, 4.0, 17)
"""Temperatures of the draft that are tried, as multiples of its own; the middle one is 1."""

_ITSELF = len(MULTIPLIERS) // 2
_TINY = 1e-38
"""Stands for a probability of 0: KL divergence would be infinite where only rounding says that q is 0."""


def log_softmax(logits: NDArray[np.floating]) -> Array:
    """Log probabilities `[V]` of logits `[V]`."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - math.log(float(np.exp(shifted).sum())))


def logs(probs: NDArray[np.floating]) -> Array:
    """Log probabilities `[V]` of weights `[V]` that need not sum to 1."""
    values = np.maximum(probs.astype(np.float64), _TINY)
    return np.asarray(np.log(values / values.sum()))


def divergence(log_p: Array, log_q: Array) -> float:
    """KL(p, q), the nats lost by taking q for p; both `[V]`."""
    p = np.exp(log_p)
    held = p > 0.0
    return max(0.0, float((p[held] * (log_p[held] - log_q[held])).sum()))


def total_variation(p: Array, q: Array) -> float:
    """TV(p, q) = sum |p - q| / 2; both `[V]`."""
    return float(np.abs(p - q).sum() / 2.0)


def overlap(p: NDArray[np.floating], q: NDArray[np.floating]) -> float:
    """sum min(p, q), the chance that a token drawn from q is kept; `[K]` each, at the tokens that q has."""
    return float(np.minimum(p, q).sum())


@dataclass(frozen=True, slots=True)
class Temperature:
    """What another temperature of the draft would change. Means over positions."""

    best: float
    """Multiple of the draft's own temperature at which its distribution is nearest to the target's. Above 1: the draft
    is too sure of itself."""
    divergence: float
    """KL in nats, as the draft is."""
    best_divergence: float
    """The same at `best`."""
    overlap: float
    """Chance that a sampled token is kept, as the draft is."""
    best_overlap: float
    """The same at `best`; the truncation of q included."""
    curve: tuple[tuple[float, float], ...]
    """(multiple, KL) of all that were tried."""


class TemperatureFit:
    """Means over positions at each of `MULTIPLIERS`, and the temperature of the least mean divergence.

    KL(p, q^(1/t) / Z) is convex in 1/t: it has one minimum, and a parabola through the three points around the least
    one in log t finds it well within the grid's steps.
    """

    def __init__(self) -> None:
        self._divergence: Array = np.zeros(len(MULTIPLIERS))
        self._overlap: Array = np.zeros(len(MULTIPLIERS))
        self._positions = self._sampled = 0

    def add(self, log_p: Array, log_q: Array) -> None:
        """Raw log probabilities of target and draft over the same tokens, `[V]` each."""
        p = np.exp(log_p)
        entropy, cross = float((p * log_p).sum()), float((p * log_q).sum())
        for i, multiplier in enumerate(MULTIPLIERS):
            scaled = log_q / multiplier
            top = float(scaled.max())
            normaliser = top + math.log(float(np.exp(scaled - top).sum()))
            self._divergence[i] += max(0.0, entropy - cross / multiplier + normaliser)
        self._positions += 1

    def add_overlaps(self, overlaps: Sequence[float]) -> None:
        """Chances that a sampled token is kept at one position, for each of `MULTIPLIERS`."""
        self._overlap += overlaps
        self._sampled += 1

    def result(self) -> Temperature | None:
        """None when nothing was added."""
        if not self._positions:
            return None
        means = self._divergence / self._positions
        kept = self._overlap / max(1, self._sampled)
        least = int(means.argmin())
        best = float(MULTIPLIERS[least])
        if 0 < least < len(means) - 1:
            left, middle, right = (float(each) for each in means[least - 1 : least + 2])
            bend = left - 2.0 * middle + right
            step = math.log(float(MULTIPLIERS[1] / MULTIPLIERS[0]))
            best *= math.exp(step * (left - right) / (2.0 * bend)) if bend > 0.0 else 1.0
        return Temperature(
            best=best,
            divergence=float(means[_ITSELF]),
            best_divergence=float(means[least]),
            overlap=float(kept[_ITSELF]),
            best_overlap=float(np.interp(math.log(best), np.log(MULTIPLIERS), kept)),
            curve=tuple((float(at), float(value)) for at, value in zip(MULTIPLIERS, means, strict=True)),
        )
