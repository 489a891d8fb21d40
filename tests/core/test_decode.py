"""The synchronous loop: greedy output equals the target's own for every schedule; cases 9, 11 and 12."""

import itertools
from dataclasses import replace

import pytest

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import Costs
from duo_ray.core.decode import decode
from duo_ray.core.gamma import GammaController, Plan, Policy
from duo_ray.core.sampling import most_probable
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, mixed_table, random_table
from duo_ray.types import ContextOverflow, FinishReason, Origin, Request, SamplingParams
from tests.core.exactness import Fixed, Silent, decoding

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)
TABLE = random_table(VOCAB, seed=1, order=3)
OTHER = random_table(VOCAB, seed=2, order=3)
PLAIN = Plan(0, 0, False, "plain")


def greedy_ids(table, prompt, count):
    """The target's own greedy decode, written down without any of our loops."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(most_probable(table(tuple(ids)), 1)[0]))
    return ids[len(prompt) :]


def run(params, plan, *, draft_table=OTHER, target_table=TABLE, chunk=128, **options):
    decoding_ = decoding(params, plan, **options)
    target = ScriptedTarget(target_table, VOCAB)
    draft = None if draft_table is None else ScriptedDraft(draft_table, VOCAB)
    tokens = list(decode(decoding_, target, draft, chunk=chunk))
    assert [token.id for token in tokens] == decoding_.generation.token_ids
    assert not target._held.logs
    return decoding_, tokens


@pytest.mark.parametrize(
    ("lead", "gamma", "sequences", "quality"),
    list(itertools.product([0, 1, 5], [0, 1, 4, 16], [1, 2, 4, 8], [0.0, 0.4, 0.6])),
)
def test_greedy_ids_are_the_targets_own(lead, gamma, sequences, quality):
    plan = Plan(lead, gamma, gamma > 0, "test")
    _, tokens = run(
        GREEDY, plan, draft_table=mixed_table(OTHER, TABLE, quality), max_tokens=40, max_sequences=sequences
    )
    assert [token.id for token in tokens] == greedy_ids(TABLE, (1, 3), 40)


@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_a_prompt_prefilled_in_chunks_gives_the_same_ids(chunk):
    prompt = tuple(i % VOCAB for i in range(1, 30))
    _, tokens = run(GREEDY, Plan(2, 4, True, "test"), prompt=prompt, chunk=chunk, max_tokens=12)
    assert [token.id for token in tokens] == greedy_ids(TABLE, prompt, 12)


@pytest.mark.parametrize("read", [3, 100])
def test_a_draft_that_only_reads_for_some_steps_goes_on_where_it_is(read, monkeypatch):
    """The draft of a request that shares it with others may be far behind: it reads piece by piece, then writes."""
    reads, writes = Plan(0, 0, False, "reads", read=read), Plan(2, 4, True, "writes")
    plans = itertools.cycle([PLAIN, PLAIN, reads, reads, PLAIN, *[writes] * 6])
    monkeypatch.setattr(Fixed, "plan", lambda *_, **__: next(plans))
    prompt = tuple(i % VOCAB for i in range(1, 10))
    one, tokens = run(GREEDY, PLAIN, prompt=prompt, draft_table=TABLE, max_tokens=60)
    assert [token.id for token in tokens] == greedy_ids(TABLE, prompt, 60)
    assert one.stats.reasons["reads"] >= 2
    assert 0 not in one.stats.gamma_history
    assert one.stats.accepted_tokens > 20


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafting_for_itself_is_accepted_entirely(temperature, sequences):
    params = SamplingParams(temperature=temperature, seed=5)
    plan = Plan(4, 0, False, "sequential") if temperature else Plan(4, 5, True, "test")
    run_, tokens = run(params, plan, draft_table=TABLE, max_tokens=41, max_sequences=sequences)
    assert {token.origin for token in tokens[1:-1]} <= {Origin.ACCEPTED, Origin.BONUS}
    assert run_.stats.accepted_per_position == run_.stats.proposed_per_position


def test_acceptance_at_a_position_does_not_depend_on_gamma():
    """Case 11: a token missing from the draft's cache after a full acceptance would lower it with gamma."""
    first = []
    for lead in (1, 2, 6):
        stats = run(GREEDY, Plan(lead, 0, False, "test"), draft_table=mixed_table(OTHER, TABLE, 0.6), max_tokens=400)[
            0
        ].stats
        first.append(stats.accepted_per_position[0] / stats.proposed_per_position[0])
    assert max(first) - min(first) < 0.12


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_is_never_overshot_nor_counted_past(max_tokens):
    run_, tokens = run(GREEDY, Plan(8, 8, True, "test"), draft_table=TABLE, max_tokens=max_tokens)
    assert len(tokens) == run_.stats.completion_tokens == max_tokens
    assert run_.generation.finish_reason is FinishReason.LENGTH


def test_eos_inside_a_block_ends_where_greedy_decoding_ends():
    """Case 1."""
    wanted = greedy_ids(TABLE, (1, 3), 30)
    eos = wanted[10]
    wanted = wanted[: wanted.index(eos) + 1]
    run_, tokens = run(GREEDY, Plan(6, 6, True, "test"), draft_table=TABLE, max_tokens=30, eos=frozenset({eos}))
    assert [token.id for token in tokens] == wanted
    assert run_.generation.finish_reason is FinishReason.STOP


def test_without_a_draft_every_token_is_plain():
    run_, tokens = run(GREEDY, PLAIN, draft_table=None, max_tokens=5)
    assert {token.origin for token in tokens} == {Origin.PLAIN}
    assert run_.stats.reasons == {"no draft": 5}


def test_the_same_seed_gives_the_same_text_and_another_one_another():
    """Case 12."""
    plan = Plan(3, 6, True, "test")
    texts = [
        tuple(token.id for token in run(SamplingParams(temperature=1.0, seed=seed), plan, max_tokens=30)[1])
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_every_origin_occurs_and_accepted_tokens_are_counted():
    run_, tokens = run(
        GREEDY, Plan(2, 5, True, "test"), draft_table=mixed_table(OTHER, TABLE, 0.65), max_tokens=300, max_sequences=2
    )
    counts = {origin: sum(token.origin is origin for token in tokens) for origin in Origin}
    assert all(counts[origin] for origin in (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS))
    assert counts[Origin.ACCEPTED] == run_.stats.accepted_tokens
    assert run_.stats.wasted_tokens == run_.stats.draft_tokens - run_.stats.accepted_tokens


def test_logprobs_are_the_targets_own():
    """Case 21."""
    params = SamplingParams(temperature=0.0, logprobs=3)
    _, drafted = run(params, Plan(3, 6, True, "test"), draft_table=mixed_table(OTHER, TABLE, 0.5), max_tokens=20)
    _, alone = run(params, PLAIN, draft_table=None, max_tokens=20)
    assert [token.logprobs for token in drafted] == [token.logprobs for token in alone]
    assert all(token.logprobs.top[0][0] == token.id for token in alone)


def test_a_prompt_longer_than_the_drafts_context_goes_on_without_a_draft():
    """Case 15."""
    request = Request("r", tuple(range(20)), GREEDY, 8)
    run_ = Decoding(
        request, eos_ids=frozenset(), detokenizer=Silent(), controller=Fixed(Plan(4, 4, True, "test")),
        stats=RequestStats(started=0.0), max_context=4096, draft_context=16,
    )  # fmt: skip
    draft = ScriptedDraft(OTHER, VOCAB, max_context=16)
    tokens = list(decode(run_, ScriptedTarget(TABLE, VOCAB), draft))
    assert [token.id for token in tokens] == greedy_ids(TABLE, range(20), 8)
    assert run_.stats.reasons == {"the draft's context of 16 tokens is full": 8}


def test_a_draft_context_that_fills_up_ends_drafting_not_the_request():
    request = Request("r", (1, 3), GREEDY, 60)
    run_ = Decoding(
        request, eos_ids=frozenset(), detokenizer=Silent(), controller=Fixed(Plan(4, 4, True, "test")),
        stats=RequestStats(started=0.0), max_context=4096, draft_context=32,
    )  # fmt: skip
    tokens = list(decode(run_, ScriptedTarget(TABLE, VOCAB), ScriptedDraft(TABLE, VOCAB, max_context=32)))
    assert [token.id for token in tokens] == greedy_ids(TABLE, (1, 3), 60)
    assert run_.stats.draft_tokens > 0


def test_a_prompt_that_fills_the_targets_context_is_refused_with_both_lengths():
    with pytest.raises(ContextOverflow, match=r"20 tokens.*16"):
        Decoding(
            Request("r", tuple(range(20)), GREEDY, 8), eos_ids=frozenset(), detokenizer=Silent(),
            controller=Fixed(PLAIN), stats=RequestStats(started=0.0), max_context=16, draft_context=None,
        )  # fmt: skip


def test_the_answer_ends_where_the_targets_context_does():
    run_ = Decoding(
        Request("r", (1, 3), GREEDY, 100), eos_ids=frozenset(), detokenizer=Silent(),
        controller=Fixed(Plan(9, 9, True, "test")), stats=RequestStats(started=0.0), max_context=16, draft_context=4096,
    )  # fmt: skip
    target = ScriptedTarget(TABLE, VOCAB, max_context=16)
    tokens = list(decode(run_, target, ScriptedDraft(TABLE, VOCAB)))
    assert len(tokens) == 14
    assert run_.generation.finish_reason is FinishReason.LENGTH


def test_an_abandoned_stream_frees_both_models():
    """Case 16."""
    target, draft = ScriptedTarget(TABLE, VOCAB), ScriptedDraft(OTHER, VOCAB)
    stream = decode(decoding(GREEDY, Plan(2, 4, True, "test"), max_tokens=50), target, draft)
    next(stream)
    assert target._held.logs
    assert draft._held.logs
    stream.close()
    assert not target._held.logs
    assert not draft._held.logs


def test_the_controller_drives_the_loop_to_the_same_ids():
    request = Request("r", (1, 3), GREEDY, 120)
    run_ = Decoding(
        request, eos_ids=frozenset(), detokenizer=Silent(),
        controller=GammaController(Policy(), Costs(), Acceptance()), stats=RequestStats(started=0.0),
        max_context=4096, draft_context=4096, max_sequences=4,
    )  # fmt: skip
    draft = ScriptedDraft(mixed_table(OTHER, TABLE, 0.6), VOCAB)
    tokens = list(decode(run_, ScriptedTarget(TABLE, VOCAB), draft))
    assert [token.id for token in tokens] == greedy_ids(TABLE, (1, 3), 120)
    assert run_.stats.accepted_tokens > 0


def test_the_lossy_rule_keeps_what_is_among_the_k_best():
    """Off by default; on, it accepts more than the exact rule and the text may differ."""
    plan = Plan(4, 0, False, "test")
    exact, _ = run(GREEDY, plan, max_tokens=100)
    lossy, _ = run(SamplingParams(temperature=0.0, acceptance_top_k=VOCAB), plan, max_tokens=100)
    assert lossy.stats.accepted_tokens > exact.stats.accepted_tokens
    assert lossy.stats.accepted_per_position == lossy.stats.proposed_per_position


def test_judged_tokens_are_the_kept_ones_and_the_first_rejected_of_each_block():
    decoding_, tokens = run(
        GREEDY, Plan(3, 0, False, "test"), draft_table=mixed_table(TABLE, OTHER, 0.4), max_tokens=60
    )
    kept, rejected = (
        sum(token.origin is origin for token in tokens) for origin in (Origin.ACCEPTED, Origin.CORRECTION)
    )
    assert 10 < kept == decoding_.stats.kept_tokens
    assert 3 < rejected == decoding_.stats.judged_tokens - kept


def test_heads_are_judged_where_the_block_before_them_was_kept_and_counted_apart():
    plan = Plan(0, 4, True, "test")
    stats = run(GREEDY, plan, draft_table=mixed_table(TABLE, OTHER, 0.4), max_tokens=120)[0].stats
    assert 0 < stats.won_heads < stats.judged_heads <= stats.target_steps
    in_the_text = stats.accepted_tokens - stats.kept_tokens
    assert stats.won_heads - 1 <= in_the_text <= stats.won_heads  # the last one may lie behind the end


def test_the_controller_is_told_what_the_draft_read_but_for_the_prompt(monkeypatch):
    told = []
    monkeypatch.setattr(Fixed, "observe_reading", lambda _, read, behind: told.append((read, behind)))
    ids = itertools.count(30)
    monkeypatch.setattr(
        ScriptedDraft,
        "draft",
        lambda self, jobs, draft=ScriptedDraft.draft: [
            (replace(block, prompt_tokens=next(ids)), probs) for block, probs in draft(self, jobs)
        ],
    )
    run(GREEDY, Plan(0, 4, True, "test"), max_tokens=12)
    assert [read for read, _ in told] == list(range(31, 31 + len(told)))
    assert len(told) >= 3
    assert all(behind >= 1 for _, behind in told)
    assert sum(behind for _, behind in told) <= 12
