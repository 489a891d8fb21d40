"""Logits to a distribution, and one draw from it.

The order is that of Hugging Face's logits processors: logit bias, repetition penalty, presence and frequency penalties,
temperature, top-k, top-p, min-p. `models/torch_sampling.py` does the same on the target's device; a test holds the two
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from duo_ray.types import NonFiniteLogits, SamplingParams

Floats = NDArray[np.floating]


class Purpose(IntEnum):
    """What a random number decides. Numbers of different purpose at one position are independent."""

    DRAFT = 0
    ACCEPT = 1
    TOKEN = 2


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """The random number in [0, 1) that decides `purpose` at `position` (an index into the request's ids).

    Counter-based (Philox, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the numbers do not depend on how
    many were drawn before, on other requests, or on the process that asks. A position is examined once, so no number is
    used twice.
    """
    bits = np.random.Philox(key=seed, counter=[0, 0, int(purpose), position]).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def penalise(logits: Floats, ids: Sequence[int], prompt_length: int, params: SamplingParams) -> Floats:
    """Logits `[V]` after bias and penalties, given all `ids` before this position; the input is left unchanged."""
    if not (params.logit_bias or params.penalised):
        return logits
    out = logits.copy()
    for token, bias in params.logit_bias:
        if token < len(out):
            out[token] += bias
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(ids, dtype=np.int64))
        score = out[seen]
        out[seen] = np.where(score > 0, score / params.repetition_penalty, score * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(np.asarray(ids[prompt_length:], dtype=np.int64), return_counts=True)
        out[seen] -= params.presence_penalty + params.frequency_penalty * counts.astype(out.dtype)
    return out


def check_finite(logits: Floats) -> None:
    """Raise `NonFiniteLogits` on NaN, +inf, or nothing left to choose from (all -inf)."""
    top = logits.max()
    if not np.isfinite(top):
        raise NonFiniteLogits(
            f"the largest of {logits.size} logits is {top}: the model's weights or activations are broken"
        )


def distribution(logits: Floats, params: SamplingParams) -> NDArray[np.float64]:
    """Penalised logits `[V]` -> probabilities `[V]`. Greedy gives all mass to the first of the largest logits."""
    check_finite(logits)
    if params.greedy:
        probs = np.zeros(len(logits))
        probs[int(logits.argmax())] = 1.0
        return probs
    probs = _softmax(logits, params.temperature)
    if 0 < params.top_k < len(probs):
        kept = np.argsort(-probs, kind="stable")[: params.top_k]
        mask = np.zeros(len(probs), dtype=bool)
        mask[kept] = True
        probs = np.where(mask, probs, 0.0)
        probs /= probs.sum()
    if params.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
        probs /= probs.sum()
    if params.min_p > 0.0:
        probs = np.where(probs >= params.min_p * probs.max(), probs, 0.0)
        probs /= probs.sum()
    return probs


def most_probable(logits: Floats, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits, best first, ties to the lower id; no sort of the whole vocabulary."""
    count = min(count, len(logits))
    smallest = np.partition(logits, len(logits) - count)[len(logits) - count]
    top = np.flatnonzero(logits >= smallest)  # argpartition would keep any of several equal to the smallest
    return top[np.lexsort((top, -logits[top]))][:count]


def draw(probs: Floats, u: float) -> int:
    """The token whose stretch of the cumulative distribution holds `u` in [0, 1)."""
    cumulative = np.cumsum(probs, dtype=np.float64)
    # The sum may miss 1 by rounding: scale u, and never land on a token of probability 0.
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probs)[-1]))


def _softmax(logits: Floats, temperature: float) -> NDArray[np.float64]:
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights: NDArray[np.float64] = np.exp(scaled)
    return np.asarray(weights / weights.sum())
