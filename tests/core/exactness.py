"""Sampled output against the target's distribution, for any rule of verification."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.decode import decode
from duo_ray.core.gamma import GammaController, Plan
from duo_ray.core.request import Detokenizer
from duo_ray.core.sampling import distribution, penalise
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, random_table
from duo_ray.types import DraftProbs, Request, SamplingParams

VOCAB = 5
LENGTH = 3
PROMPT = (1, 3)


def cached(table):
    return functools.lru_cache(maxsize=None)(table)


TARGET_TABLE = cached(random_table(VOCAB, seed=7, order=2, scale=1.5))
DRAFT_TABLE = cached(random_table(VOCAB, seed=8, order=2, scale=1.0))


class Fixed(GammaController):
    """A controller that always says the same."""

    def __init__(self, plan):
        self.fixed, self.acceptance = plan, Acceptance()

    def plan(self, *, may_lead=True, behind=1, further=0):
        return self.fixed

    def calibrate(self, chance, *, won):
        pass

    def observe_reading(self, read, behind):
        pass

    def observe_pace(self, pace):
        pass

    def width_cost(self, gamma):
        return 0.5

    def observe(self, **step):
        pass


class Silent:
    def push(self, token):
        return ""


def decoding(
    params: SamplingParams,
    plan: Plan,
    *,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = LENGTH,
    max_sequences: int = 1,
    eos: frozenset[int] = frozenset(),
    request_id: str = "r",
    detokenizer: Detokenizer | None = None,
    **options: Any,
) -> Decoding[DraftProbs]:
    request = Request(request_id, tuple(prompt), params, max_tokens, **options)
    return Decoding(
        request,
        eos_ids=eos,
        detokenizer=detokenizer or Silent(),
        controller=Fixed(plan),
        stats=RequestStats(started=0.0),
        max_context=4096,
        draft_context=4096,
        max_sequences=max_sequences,
    )


def ids_of(target, draft, params, plan, **options):
    run = decoding(params, plan, **options)
    for _ in decode(run, target, draft):
        pass
    return tuple(run.generation.token_ids)


def exact_distribution(params):
    """Probability of each of the VOCAB ** LENGTH outputs under the target alone, written down without any rule."""
    out = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(output):
            ids = (*PROMPT, *output[:i])
            chance *= distribution(penalise(TARGET_TABLE(ids), ids, len(PROMPT), params), params)[token]
        out[output] = chance
    return out


def p_value(counts, expected, samples):
    """Chi-square test of observed outputs; outputs expected less than 5 times share a cell. An impossible output: 0."""
    if any(expected[output] == 0 for output in counts):
        return 0.0
    small = [o for o, chance in expected.items() if chance * samples < 5]
    cells = [[o] for o in expected if o not in set(small)] + ([small] if small else [])
    observed = np.array([sum(counts.get(o, 0) for o in cell) for cell in cells], dtype=float)
    wanted = np.array([sum(expected[o] for o in cell) * samples for cell in cells])
    keep = wanted > 0
    return float(stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue)


def observed(params_of, plan, *, samples, max_sequences=1, keep=VOCAB, target=None, draft=None):
    """How often each output comes when request i is sampled with `params_of(i)`."""
    target = target or ScriptedTarget(TARGET_TABLE, VOCAB)
    draft = draft or ScriptedDraft(DRAFT_TABLE, VOCAB, keep=keep)
    counts = {}
    for i in range(samples):
        output = ids_of(target, draft, params_of(i), plan, max_sequences=max_sequences, request_id=str(i))
        counts[output] = counts.get(output, 0) + 1
    return counts
