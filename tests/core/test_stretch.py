"""Several plain steps in one call of the target: the same tokens, and everybody knows how many steps there were."""

from dataclasses import replace

import numpy as np
import pytest

from duo_ray.core.context import IdLog
from duo_ray.core.costs import LARGEST, STRETCH_S, Costs
from duo_ray.core.decode import decode
from duo_ray.core.gamma import PROBE, Plan
from duo_ray.core.stretch import draw_further
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, random_table
from duo_ray.types import FinishReason, Origin, SamplingParams, Span, VerifyJob
from tests.core.exactness import decoding

VOCAB = 40
TABLE = random_table(VOCAB, seed=1, order=3)
PLAIN = Plan(0, 0, False, "plain: for a test", further=LARGEST)
SAMPLED = SamplingParams(
    temperature=1.1, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2, seed=9, logprobs=2
)
GREEDY = SamplingParams(temperature=0.0)


class Timed(ScriptedTarget):
    """Every pass takes so many seconds, by its spans."""

    def __init__(self, table=TABLE, seconds=0.001):
        super().__init__(table, VOCAB)
        self.seconds, self.passes = seconds, 0

    def verify(self, jobs, probs):
        reply = super().verify(jobs, probs)
        self.passes += 1
        return replace(reply, span=Span(self.seconds * (self.passes - 1), self.seconds * self.passes))


def stretching(one, further, target=None):
    """Tokens of a request whose target takes up to `further` plain steps more at once, and the steps of each call."""
    target, tokens, calls = target or Timed(), [], []
    while not one.finished:
        one.plan()
        job = one.verify_job(128, further=further)
        reply = target.verify([job], [None])
        if job.further:
            reply = draw_further(target, job, reply)
        one.prefilled(reply.verdicts[0])
        tokens += one.commit(reply.verdicts[0]) + one.settle()
        calls.append(reply.passes)
    return tokens, calls


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(GREEDY, logprobs=3)])
@pytest.mark.parametrize("further", [1, 3, 7])
def test_it_draws_what_single_steps_would(params, further):
    plain = decoding(params, PLAIN, max_tokens=30)
    expected = list(decode(plain, ScriptedTarget(TABLE, VOCAB)))
    one = decoding(params, PLAIN, max_tokens=30)
    tokens, calls = stretching(one, further)
    assert tokens == expected  # ids, texts, logprobs, and the step each came from
    assert one.generation.finish_reason is FinishReason.LENGTH
    assert one.stats.target_steps == plain.stats.target_steps == 30
    assert dict(one.stats.reasons) == {"plain": 30}
    assert calls[0] == 1  # the prefill's token is shown at once
    assert max(calls) == 1 + further
    assert sum(calls) == 30


def test_an_end_ends_it():
    free = [token.id for token in decode(decoding(GREEDY, PLAIN, max_tokens=30), ScriptedTarget(TABLE, VOCAB))]
    end = next(token for place, token in enumerate(free) if place >= 4 and token not in free[:place])
    one = decoding(GREEDY, PLAIN, max_tokens=30, eos=frozenset({end}))
    tokens, calls = stretching(one, 20)
    assert [token.id for token in tokens] == free[: free.index(end) + 1]
    assert sum(calls) == len(tokens)  # no pass was made in vain


def test_a_stop_string_within_it_ends_the_text_there():
    one = decoding(GREEDY, PLAIN, max_tokens=30)
    free = [token.id for token in stretching(one, 0)[0]]
    stop = next(token for place, token in enumerate(free) if place >= 4 and token not in free[:place])
    one = decoding(GREEDY, PLAIN, max_tokens=30, stop=(f"<{stop}>",), detokenizer=Spelled())
    tokens, _ = stretching(one, 20)
    assert [token.id for token in tokens] == free[: free.index(stop) + 1]
    assert one.generation.finish_reason is FinishReason.STOP
    assert one.stats.completion_tokens == len(tokens)
    assert one.stats.target_steps == len(tokens)


class Spelled:
    def push(self, token):
        return f"<{token}>"


def test_a_pass_that_fails_loses_nothing():
    target = Timed(broken_after(8))
    one = decoding(GREEDY, PLAIN, max_tokens=30)
    with pytest.raises(Exception, match="is nan"):
        stretching(one, 20, target)
    expected = list(decode(decoding(GREEDY, PLAIN, max_tokens=30), ScriptedTarget(TABLE, VOCAB)))
    committed = one.generation.token_ids
    assert len(committed) >= 4
    assert committed == [token.id for token in expected[: len(committed)]]


def broken_after(length):
    return lambda ids: TABLE(ids) if len(ids) < length else np.full(VOCAB, np.nan)


@pytest.mark.parametrize(
    "change", [{"reproducible": True}, {"draft_busy": True}, {"hand": True}, {"plan": replace(PLAIN, further=0)}]
)
def test_there_is_none_where_more_than_plain_decoding_goes_on(change):
    writing = Plan(0, 4, True, "writes")
    plan = writing if "draft_busy" in change or "hand" in change else change.get("plan", PLAIN)
    one = decoding(GREEDY, plan, max_tokens=30, reproducible="reproducible" in change)
    target, draft = ScriptedTarget(TABLE, VOCAB), ScriptedDraft(TABLE, VOCAB)
    one.plan()
    job = one.draft_job()
    one.prefilled(target.verify([one.verify_job(128)], [None]).verdicts[0])
    one.commit(target.verify([one.verify_job(128)], [None]).verdicts[0])
    if "hand" in change:
        one.offer(*draft.draft([job])[0])
    one.settle()
    one.controller.fixed = plan if "plan" in change or "reproducible" in change else PLAIN
    one.plan()
    assert one.verify_job(128, further=5).further == 0


def test_as_many_as_are_left_at_most():
    one = decoding(GREEDY, PLAIN, max_tokens=3)
    _, calls = stretching(one, 20)
    assert calls == [1, 2]


def test_the_first_pass_of_it_is_a_plain_one():
    target = ScriptedTarget(TABLE, VOCAB)
    context = IdLog((1, 2, 3)).context("r", agreed=0, prompt_length=3)
    job = VerifyJob(context, (), GREEDY, chunk=2, further=4)
    assert draw_further(target, job, target.verify([job], [None])).passes == 1


def test_it_lasts_as_long_as_another_request_may_wait_for_it():
    costs = Costs()
    costs.observe_target(1, STRETCH_S / 4.5)
    assert costs.stretch() == 4
    assert costs.frozen().stretch() == 1  # a seed's text must not depend on what else is learned
    slow = Costs()
    slow.observe_target(1, 10 * STRETCH_S)
    assert slow.stretch() == 1
    assert {token.origin for token in stretching(decoding(GREEDY, PLAIN, max_tokens=9), 3)[0]} == {Origin.PLAIN}


@pytest.mark.parametrize("offered", ["in it", "after it"])
def test_a_probe_that_takes_long_does_not_stop_it_and_its_block_is_held_for_what_comes_then(offered):
    """The block of a draft that is always right: what has not been committed by then is right."""
    one = decoding(GREEDY, Plan(0, 12, True, PROBE), max_tokens=30)
    target, draft = Timed(), ScriptedDraft(TABLE, VOCAB)
    one.plan()
    block = draft.draft([one.draft_job()])[0]
    for allowed, further in ((0, 5), (0, 5), (5, 5)):  # a block that comes a step late is of use
        job = one.verify_job(128, further=further)
        assert job.further == allowed
        reply = draw_further(target, job, target.verify([job], [None]))
        one.prefilled(reply.verdicts[0])
        one.commit(reply.verdicts[0])
        if allowed and offered == "in it":
            one.offer(*block)
        one.settle()
        one.controller.fixed = PLAIN
        if allowed and offered == "after it":
            one.offer(*block)
        one.plan()
    assert len(one.generation.token_ids) == 8
    expected = [token.id for token in decode(decoding(GREEDY, PLAIN, max_tokens=30), ScriptedTarget(TABLE, VOCAB))]
    held = one.verify_job(128).block
    assert len(held) == 12 - 8
    assert [*one.generation.token_ids, *held] == expected[:12]
    assert not one.verify_job(128, further=5).further


def test_passes_that_take_longer_than_expected_end_it():
    _, calls = stretching(decoding(GREEDY, PLAIN, max_tokens=30), 20, Timed(seconds=STRETCH_S / 2.5))
    assert max(calls) == 3


def test_the_next_job_names_what_the_target_holds():
    one = decoding(GREEDY, PLAIN, max_tokens=30)
    target = Timed()
    for _ in range(4):
        one.plan()
        job = one.verify_job(128, further=5)
        reply = draw_further(target, job, target.verify([job], [None]))
        one.prefilled(reply.verdicts[0])
        one.commit(reply.verdicts[0])
        one.settle()
        assert len(one.verify_job(128).context.ids) == 1
