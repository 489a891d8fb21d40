"""Sampled output has the target's distribution, and the test that says so fails for wrong rules.

Each case draws 20,000 outputs of 3 tokens over a vocabulary of 5 with fixed seeds and compares their counts with the
exact probabilities of all 125 outputs. A right rule fails a case with probability 1e-4; every wrong rule must fall
below 1e-9, for which 4,000 outputs are enough.
"""

import dataclasses

import numpy as np
import pytest

from duo_ray.core import judge
from duo_ray.core import verify as rules
from duo_ray.core.gamma import Plan
from duo_ray.core.sampling import draw
from duo_ray.models import scripted
from duo_ray.models.scripted import ScriptedTarget
from duo_ray.types import SamplingParams
from tests.core.exactness import DRAFT_TABLE, TARGET_TABLE, VOCAB, exact_distribution, observed, p_value

SAMPLES = 20_000
FEWER = 4_000
DUO = Plan(lead=2, gamma=8, overlap=True, reason="test")


@pytest.mark.parametrize(
    ("changes", "plan", "max_sequences", "keep"),
    [
        pytest.param({"temperature": 0.7}, DUO, 1, VOCAB, id="cold, one sequence"),
        pytest.param({"temperature": 1.3}, DUO, 4, VOCAB, id="hot, four sequences"),
        pytest.param({"temperature": 1.3, "top_k": 3}, DUO, 3, VOCAB, id="top-k, three sequences"),
        pytest.param({"temperature": 0.7, "top_p": 0.8}, DUO, 2, 2, id="top-p, two sequences, q truncated"),
        pytest.param({"temperature": 1.0, "min_p": 0.05, "logit_bias": ((2, 1.5), (4, float("-inf"))),
                      "repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.5},
                     DUO, 4, VOCAB, id="min-p, bias, a banned token, penalties"),
        pytest.param({"temperature": 1.0}, Plan(lead=3, gamma=0, overlap=False, reason="test"), 1, VOCAB,
                     id="sequential"),
        pytest.param({"temperature": 1.0}, Plan(lead=0, gamma=3, overlap=True, reason="test"), 4, VOCAB,
                     id="published loop"),
    ],
)  # fmt: skip
def test_sampled_output_has_the_targets_distribution(changes, plan, max_sequences, keep):
    counts = observed(
        lambda i: SamplingParams(**changes, seed=i), plan, samples=SAMPLES, max_sequences=max_sequences, keep=keep
    )
    assert p_value(counts, exact_distribution(SamplingParams(**changes)), SAMPLES) > 1e-4


def accept_by_p_alone(p, block, q, accept, token, lossy=None):
    for i, drafted in enumerate(block):
        if accept(i) >= p(i)[drafted]:
            return i, draw(rules.residual(p(i), *q[i]), token(i))
    return len(block), draw(p(len(block)), token(len(block)))


def no_residual(p, block, q, accept, token, lossy=None):
    accepted, drawn = rules.verify(p, block, q, accept, token)
    return accepted, drawn if accepted == len(block) else draw(p(accepted), token(accepted))


class WrongHeads(ScriptedTarget):
    """Tries the heads in order, each against the whole of p instead of what the rejected ones left."""

    def verify(self, jobs, probs):
        reply = super().verify(jobs, probs)
        (verdict,), (job,) = reply.verdicts, jobs
        if verdict.token is None or verdict.accepted < len(job.block):
            return reply
        ids = (*self._held.logs[job.context.request_id].ids, *job.block)
        p = scripted.distribution(self._table(ids), job.sampling)
        rng = np.random.default_rng([job.sampling.seed, len(ids)])
        heads = scripted.most_probable(DRAFT_TABLE(ids), 4)
        chosen = next((int(head) for head in heads if rng.random() < p[head]), draw(p, rng.random()))
        return dataclasses.replace(reply, verdicts=(dataclasses.replace(verdict, token=chosen),))


@pytest.mark.parametrize("rule", [accept_by_p_alone, no_residual])
def test_a_wrong_rule_fails_the_same_test(rule, monkeypatch):
    monkeypatch.setattr(judge, "verify", rule)
    params = SamplingParams(temperature=1.0)
    counts = observed(lambda i: dataclasses.replace(params, seed=i), DUO, samples=FEWER, max_sequences=2)
    assert p_value(counts, exact_distribution(params), FEWER) < 1e-9


def test_heads_tried_against_the_wrong_rest_fail_the_same_test():
    params = SamplingParams(temperature=1.0)
    target = WrongHeads(TARGET_TABLE, VOCAB)
    counts = observed(lambda i: dataclasses.replace(params, seed=i), DUO, samples=FEWER, max_sequences=4, target=target)
    assert p_value(counts, exact_distribution(params), FEWER) < 1e-9
