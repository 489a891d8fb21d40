"""Real models in real Ray actors: exact, overlapping, seeded, freed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from duo_ray.types import ContextOverflow, Finished, FinishReason, Origin, Token
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.ray, pytest.mark.models]

COUNT = 32
SAMPLE = PROMPTS[:6]


@pytest.fixture(scope="module")
def own(duo, reference):
    """Prompt ids and the target's own greedy ids for them."""
    prompts = [duo.request(prompt).prompt for prompt in SAMPLE]
    return list(zip(SAMPLE, reference(prompts, COUNT), strict=True))


@pytest.mark.parametrize(("budget", "sequences"), [(None, 4), (None, 1), (1, 1), (4, 2), (16, 4)], ids=str)
def test_greedy_ids_equal_the_targets_own_generate(duo, own, budget, sequences):
    for prompt, wanted in own:
        answer = duo.generate(prompt, temperature=0.0, max_tokens=COUNT, draft_budget=budget, max_sequences=sequences)
        assert list(answer.token_ids) == wanted, prompt


def test_the_target_alone_through_the_same_actors_gives_the_same_ids(duo, own):
    for prompt, wanted in own[:3]:
        answer = duo.generate(prompt, temperature=0.0, max_tokens=COUNT, draft=False)
        assert list(answer.token_ids) == wanted
        assert answer.stats["draft_tokens"] == 0
        assert {token.origin for token in answer.tokens} == {Origin.PLAIN}


def test_the_stats_are_whole_and_agree_with_the_tokens(duo):
    request = duo.request("Count from one to thirty in words.", temperature=0.0, max_tokens=60, draft_budget=4)
    # Reproducible: every block is waited for, however busy the machine.
    answer = duo.generate(replace(request, reproducible=True))
    stats = answer.stats
    assert {
        "target_steps", "draft_tokens", "accepted_tokens", "wasted_tokens", "mean_accepted", "acceptance_per_position",
        "gamma_history", "sequences_history", "t_target_ms", "t_draft_ms", "ttft_ms", "tokens_per_s",
        "round_overhead_ms", "target_idle", "draft_idle",
    } <= set(stats)  # fmt: skip
    assert stats["accepted_tokens"] == sum(token.origin is Origin.ACCEPTED for token in answer.tokens) > 20
    assert stats["wasted_tokens"] == stats["draft_tokens"] - stats["accepted_tokens"]
    assert stats["target_steps"] < answer.completion_tokens == len(answer.tokens)
    assert 0 <= stats["target_idle"] <= 1
    assert 0 <= stats["draft_idle"] <= 1
    assert stats["round_overhead_ms"]["p50"] <= stats["round_overhead_ms"]["p90"]
    assert answer.prompt_tokens == len(request.prompt)


def test_draft_and_target_of_one_request_work_at_the_same_time_in_every_step(duo):
    request = duo.request(
        "Count from one to fifty in words.",
        temperature=0.0,
        max_tokens=60,
        ignore_eos=True,
        trace=True,
        draft_budget=4,
    )
    # Reproducible: planned by calibrated times, so that a busy machine does not make it decode plainly.
    answer = duo.generate(replace(request, reproducible=True))
    verify = [event.span for event in answer.trace if event.name == "verify"][1:]
    drafting = [event.span for event in answer.trace if event.actor == "draft-0"]
    together = [any(v.started < d.ended and d.started < v.ended for d in drafting) for v in verify]
    assert len(verify) > 5
    assert all(together[:-2])  # the last ones have nothing left to draft


def test_requests_at_the_same_time_get_what_they_get_alone(duo, own):
    answers = {}

    def ask(prompt):
        answers[prompt] = duo.generate(prompt, temperature=0.0, max_tokens=COUNT)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt, _ in own[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {prompt: list(answers[prompt].token_ids) for prompt, _ in own[:6]} == dict(own[:6])


def test_the_same_seed_gives_the_same_text_and_another_one_another(duo):
    ask = {"temperature": 1.0, "top_p": 0.95, "max_tokens": COUNT}
    first = duo.generate("Invent a story.", seed=7, **ask)
    duo.generate("Invent another.", **ask)
    assert first.stats["draft_tokens"] > 0
    assert duo.generate("Invent a story.", seed=7, **ask).token_ids == first.token_ids
    assert duo.generate("Invent a story.", seed=9, **ask).token_ids != first.token_ids


def test_what_a_prompt_shares_with_an_earlier_one_is_not_run_again(duo):
    """The next turn of a conversation: target and draft have all of it but what is new."""
    turn = [{"role": "user", "content": "Name three rivers of Europe and say where each of them ends."}]
    first = duo.generate(turn, temperature=0.0, max_tokens=24, draft_budget=4)
    turns = [*turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the longest?"}]
    second = duo.generate(turns, temperature=0.0, max_tokens=24, draft_budget=4)
    shared = first.prompt_tokens + first.completion_tokens - 8
    assert shared <= second.stats["cached_tokens"] < second.prompt_tokens
    assert shared <= second.stats["draft_cached_tokens"] < second.prompt_tokens
    alone = duo.generate(turns, temperature=0.0, max_tokens=24, draft=False)
    assert second.token_ids == alone.token_ids


def test_a_seed_gives_the_same_text_whatever_is_cached(duo):
    ask = {"temperature": 1.0, "top_p": 0.95, "max_tokens": COUNT, "seed": 11}
    first = duo.generate("Describe a market in the morning.", **ask)
    duo.generate("Describe a market in the morning.", temperature=0.0, max_tokens=8)
    again = duo.generate("Describe a market in the morning.", **ask)
    assert again.stats["cached_tokens"] == 0
    assert again.token_ids == first.token_ids


def test_one_requests_seed_does_not_disturb_anothers(duo):
    """Case 12. Without a draft, whose rounding depends on what else it computes, not one token may change."""
    ask = {"temperature": 1.0, "top_p": 0.95, "max_tokens": COUNT, "draft": False}
    first = duo.generate("Invent a story.", seed=7, **ask)
    disturbance = threading.Thread(target=lambda: duo.generate("Invent another.", seed=8, **ask))
    disturbance.start()
    again = duo.generate("Invent a story.", seed=7, **ask)
    disturbance.join()
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(duo, max_tokens):
    """Case 4."""
    answer = duo.generate("Explain gravity to a child.", temperature=0.0, max_tokens=max_tokens)
    assert len(answer.tokens) == answer.completion_tokens == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_stop_string_is_cut_where_the_targets_text_first_has_it(duo, own):
    """Case 2."""
    whole = duo.generate(SAMPLE[0], temperature=0.0, max_tokens=COUNT).text
    for stop in (whole[30:36], whole[51:53], whole[80:95]):
        answer = duo.generate(SAMPLE[0], temperature=0.0, max_tokens=COUNT, stop=[stop])
        assert answer.text == whole[: whole.index(stop)]
        assert answer.finish_reason is FinishReason.STOP


def test_eos_ends_the_answer_and_ignore_eos_does_not(duo):
    """Case 1."""
    prompt = "Reply with the single word: yes"
    answer = duo.generate(prompt, temperature=0.0, max_tokens=200)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] in duo.prepared.tokenizer.eos_ids
    longer = duo.generate(prompt, temperature=0.0, max_tokens=answer.completion_tokens + 10, ignore_eos=True)
    assert longer.token_ids[: answer.completion_tokens] == answer.token_ids
    assert longer.finish_reason is FinishReason.LENGTH


def test_a_prompt_over_the_context_is_refused_with_both_lengths_and_the_pipeline_goes_on(duo):
    with pytest.raises(ContextOverflow, match=r"\d+ tokens.*640"):
        duo.generate("word " * 2000, max_tokens=5)
    assert duo.generate("Hi", temperature=0.0, max_tokens=3).completion_tokens == 3


def test_logprobs_with_a_draft_equal_those_without(duo):
    """Case 21."""
    ask = {"temperature": 0.0, "max_tokens": 20, "logprobs": 3}
    drafted = duo.generate(SAMPLE[0], **ask).tokens
    alone = duo.generate(SAMPLE[0], draft=False, **ask).tokens
    for left, right in zip(drafted, alone, strict=True):
        assert [i for i, _ in left.logprobs.top] == [i for i, _ in right.logprobs.top]
        assert left.logprobs.logprob == pytest.approx(right.logprobs.logprob, abs=1e-3)


def test_logprobs_of_requests_that_share_passes_equal_those_alone(duo):
    """Case 21."""
    ask = {"temperature": 0.0, "max_tokens": 16, "logprobs": 3}
    alone = [duo.generate(prompt, draft=False, **ask).tokens for prompt in SAMPLE[:3]]
    at_once = {}
    threads = [
        threading.Thread(target=lambda i=i: at_once.__setitem__(i, duo.generate(SAMPLE[i], **ask).tokens))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tokens in enumerate(alone):
        for left, right in zip(at_once[i], tokens, strict=True):
            assert left.id == right.id
            assert [token for token, _ in left.logprobs.top] == [token for token, _ in right.logprobs.top]
            assert left.logprobs.logprob == pytest.approx(right.logprobs.logprob, abs=1e-3)


def test_an_abandoned_stream_frees_its_slot(duo):
    """Cases 16 and 18: more abandoned streams than there are slots, then all slots serve at once."""
    for _ in range(6):
        stream = duo.stream("Write a very long story.", temperature=0.0, max_tokens=400)
        assert isinstance(next(stream), Token)
        stream.close()
    done = []
    threads = [
        threading.Thread(target=lambda: done.append(duo.generate("Hi", temperature=0.0, max_tokens=4)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(done) == 4


def test_a_stream_ends_with_its_figures(duo):
    items = list(duo.stream("Hi", temperature=0.0, max_tokens=4))
    assert isinstance(items[-1], Finished)
    assert all(isinstance(item, Token) for item in items[:-1])
