"""What the target runs, what it holds of a request, and what it takes over from others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from duo_ray.core.context import IdLog
from duo_ray.models.transformers import TransformersTarget
from duo_ray.types import (
    Context,
    ContextOverflow,
    DraftProbs,
    NonFiniteLogits,
    SamplingParams,
    TargetModel,
    UnknownPrefix,
    Verdict,
    VerifyJob,
)
from tests.models.tiny_transformers import VOCAB, own_greedy, tiny_model
from tests.models.verifying import GREEDY, Client, no_block, random_blocks, random_ids, step

# --- what is run and what is held -------------------------------------------------------------------------------


def test_it_is_a_target_model(target: TransformersTarget) -> None:
    assert isinstance(target, TargetModel)
    assert (target.vocab_size, target.max_context, target.slots) == (VOCAB, 120, 3)


def test_only_new_ids_are_run(llama: Any, target: TransformersTarget) -> None:
    client = Client("a", random_ids(30, seed=12))
    answer = own_greedy(llama, client.prompt, 20)
    assert step(target, [client], no_block).tokens == 30
    assert step(target, [client], lambda _: tuple(answer[1:6])).tokens == 6  # the drawn token and the block
    assert step(target, [client], lambda _: (answer[7], (answer[8] + 1) % VOCAB)).tokens == 3
    assert step(target, [client], no_block).tokens == 1


def test_asking_again_gives_the_same_verdict(target: TransformersTarget) -> None:
    client = Client("a", random_ids(20, seed=13))
    first = target.verify([client.job((1, 2, 3))], [None])
    again = target.verify([client.job((1, 2, 3))], [None])
    assert again.verdicts == first.verdicts
    assert again.tokens == 4


def test_a_prompt_is_run_in_as_many_chunks_as_it_takes(llama: Any, target: TransformersTarget) -> None:
    client, other = Client("a", random_ids(60, seed=14)), Client("b", random_ids(9, seed=15))
    reply = target.verify([client.job(chunk=25), other.job(chunk=25)], [None, None])
    assert reply.verdicts[0] == Verdict("a", 0, None)
    assert reply.verdicts[1].token == own_greedy(llama, other.prompt, 1)[0]
    assert reply.tokens == 25 + 9
    assert target.verify([client.job(chunk=25)], [None]).verdicts[0].token is None
    last = target.verify([client.job(chunk=25)], [None])
    assert last.tokens == 10
    assert last.verdicts[0].token == own_greedy(llama, client.prompt, 1)[0]


def test_a_block_behind_a_prompt_run_in_chunks_is_judged_in_one_pass(llama: Any, target: TransformersTarget) -> None:
    client = Client("a", random_ids(33, seed=21))
    block = tuple(own_greedy(llama, client.prompt, 4))
    passes = [target.verify([client.job(block, chunk=16)], [None]) for _ in range(3)]
    assert [reply.tokens for reply in passes] == [16, 16, 5]
    assert [reply.verdicts[0].accepted for reply in passes] == [0, 0, 4]


def test_verdicts_come_in_the_order_of_the_jobs(target: TransformersTarget) -> None:
    clients = [Client(name, random_ids(n, seed=n)) for name, n in (("long", 60), ("short", 3), ("middle", 40))]
    step(target, clients, no_block)
    reply = step(target, clients[::-1], no_block)
    assert [v.request_id for v in reply.verdicts] == ["middle", "short", "long"]


def test_the_span_covers_the_pass(target: TransformersTarget) -> None:
    reply = target.verify([Client("a", [1, 2, 3]).job()], [None])
    assert 0 < reply.span.started < reply.span.ended


def test_a_released_request_must_send_all_ids_again(target: TransformersTarget) -> None:
    clients = [Client(name, random_ids(8, seed=16)) for name in ("a", "b", "c")]
    step(target, clients, no_block)
    target.release("a")
    target.release("c")
    jobs = [client.job() for client in clients]
    with pytest.raises(UnknownPrefix) as caught:
        target.verify(jobs, [None] * 3)
    assert caught.value.request_ids == ("a", "c")
    for client in clients:
        client.agreed = 0
    assert [v.token for v in step(target, clients, no_block).verdicts] == [clients[0].emitted[-1]] * 3


def test_another_prefix_of_the_same_length_is_unknown(target: TransformersTarget) -> None:
    step(target, [Client("a", [1, 2, 3, 4])], no_block)
    other = IdLog([1, 2, 9, 4]).context("a", agreed=4, prompt_length=4, extra=(5,))
    with pytest.raises(UnknownPrefix):
        target.verify([VerifyJob(other, (), GREEDY)], [None])


def test_releasing_an_unknown_request_does_nothing(target: TransformersTarget) -> None:
    target.release("never seen")
    step(target, [Client(str(i), [1, 2]) for i in range(3)], no_block)


def test_a_full_target_says_how_many_slots_there_are(target: TransformersTarget) -> None:
    step(target, [Client("a", [1, 2]), Client("b", [1, 2])], no_block)
    with pytest.raises(ContextOverflow, match="2 new requests, but only 1 of 3 slots"):
        step(target, [Client("c", [1, 2]), Client("d", [1, 2])], no_block)
    target.release("a")
    step(target, [Client("c", [1, 2]), Client("d", [1, 2])], no_block)


def test_a_context_beyond_the_limit_names_both_numbers(target: TransformersTarget) -> None:
    client = Client("a", random_ids(115, seed=17))
    with pytest.raises(ContextOverflow, match=r"115 ids and a block of 6 .*max_context=120"):
        step(target, [client], lambda _: (1,) * 6)
    client.agreed = 0
    step(target, [client], lambda _: (1,) * 5)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (
            [VerifyJob(Context("a", 0, 0, (1, VOCAB), 1), (), GREEDY)],
            f"id {VOCAB} is outside the vocabulary of {VOCAB}",
        ),
        ([VerifyJob(Context("a", 0, 0, (1,), 1), (-1,), GREEDY)], "id -1 is outside"),
        ([VerifyJob(Context("a", 0, 0, (), 0), (), GREEDY)], "no ids to draw from"),
        ([VerifyJob(Context("a", 0, 0, (1,), 1), (2,), GREEDY, chunk=0)], "chunk=0 must be at least 1"),
        ([VerifyJob(Context("a", 0, 0, (1,), 1), (), GREEDY)] * 2, "two jobs of one request"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(jobs: list[VerifyJob], message: str, target: TransformersTarget) -> None:
    with pytest.raises(ValueError, match=message):
        target.verify(jobs, [None] * len(jobs))


@pytest.mark.parametrize(("offset", "token", "message"), [(1, 2, "only 1 rows"), (0, VOCAB, "outside the target's")])
def test_draft_probabilities_that_do_not_fit_are_refused(
    offset: int, token: int, message: str, target: TransformersTarget
) -> None:
    q = DraftProbs((np.full((2, 1), token, np.int32),), (np.ones((2, 1), np.float32),))
    job = VerifyJob(Context("a", 0, 0, (1,), 1), (2, 3), SamplingParams(), offset=offset)
    with pytest.raises(ValueError, match=message):
        target.verify([job], [q])


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.0, presence_penalty=0.5), SamplingParams(temperature=1.0)]
)
def test_a_broken_pass_is_reported_and_leaves_nothing_behind(params: SamplingParams, llama: Any) -> None:
    model = tiny_model("llama")
    target = TransformersTarget(model, max_context=120, packed=False)
    weight = model.model.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(NonFiniteLogits, match=r"request broken: .*nan"):
        target.verify([Client("broken", random_ids(50, seed=18), params).job()], [None])
    target.release("broken")
    with torch.no_grad():
        weight.copy_(kept)
    client = Client("sound", random_ids(20, seed=18))  # shorter: it does not overwrite all that the first one wrote
    step(target, [client], no_block)
    assert client.emitted == own_greedy(llama, client.prompt, 1)


# --- what other requests left ------------------------------------------------------------------------------------


def test_a_new_request_runs_only_what_no_slot_holds(pair: tuple[Any, TransformersTarget]) -> None:
    """Also past a sliding window, and although the first request's answer follows in the slot."""
    model, target = pair
    shared = random_ids(40, seed=30)
    first = Client("first", [*shared, *random_ids(5, seed=31)])
    for i in range(4):
        step(target, [first], random_blocks(i))
    target.release("first")
    second = Client("second", [*shared, *random_ids(9, seed=32)])
    reply = step(target, [second], no_block)
    assert reply.verdicts[0].cached >= 40
    assert reply.tokens <= 9
    while len(second.emitted) < 12:
        step(target, [second], random_blocks(len(second.emitted)))
    target.release("second")
    assert second.emitted[:12] == own_greedy(model, second.prompt, 12)


def test_a_prefix_held_by_a_running_request_is_copied(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    shared = random_ids(40, seed=33)
    first, second = (Client(name, [*shared, *random_ids(4, seed=i)]) for i, name in enumerate(("first", "second")))
    step(target, [first], random_blocks(1))
    reply = step(target, [second], no_block)
    assert (reply.verdicts[0].cached, reply.tokens) == (40, 4)
    while min(len(first.emitted), len(second.emitted)) < 12:
        step(target, [first, second], random_blocks(len(first.emitted)))
    for client in (first, second):
        target.release(client.request_id)
        assert client.emitted[:12] == own_greedy(model, client.prompt, 12)


def test_the_same_prompt_asked_for_at_once_is_run_once(llama: Any, target: TransformersTarget) -> None:
    prompt = random_ids(100, seed=34)
    clients = [Client(str(i), prompt) for i in range(3)]
    first = target.verify([client.job(chunk=200) for client in clients], [None] * 3)
    assert first.tokens == 100
    assert [verdict.token is None for verdict in first.verdicts] == [False, True, True]
    second = target.verify([client.job(chunk=200) for client in clients[1:]], [None] * 2)
    assert second.tokens == 2
    assert [verdict.cached for verdict in second.verdicts] == [99, 99]
    assert {v.token for v in (first.verdicts[0], *second.verdicts)} == {own_greedy(llama, prompt, 1)[0]}


def test_rejected_ids_are_not_taken_for_a_prefix(llama: Any, target: TransformersTarget) -> None:
    """What stays of a block in the slot are its ids, not the committed ones that came in their place."""
    first = Client("first", random_ids(20, seed=35))
    answer = own_greedy(llama, first.prompt, 20)
    step(target, [first], lambda _: tuple((token + 1) % VOCAB for token in answer[:12]))
    target.release("first")
    second = Client("second", [*first.prompt, *answer[:12]])
    reply = step(target, [second], no_block)
    assert reply.verdicts[0].cached == 20
    assert second.emitted == answer[12:13]


def test_a_reproducible_request_takes_over_nothing(target: TransformersTarget) -> None:
    first = Client("first", random_ids(40, seed=36))
    step(target, [first], no_block)
    context = IdLog(first.prompt).context("second", agreed=0, prompt_length=40)
    reply = target.verify([VerifyJob(context, (), GREEDY, reproducible=True)], [None])
    assert (reply.verdicts[0].cached, reply.tokens) == (0, 40)


def test_of_idle_slots_without_a_common_prefix_the_one_idle_longest_is_taken(target: TransformersTarget) -> None:
    clients = [Client(str(i), random_ids(20, seed=40 + i)) for i in range(3)]
    step(target, clients, no_block)
    for client in (clients[1], clients[0], clients[2]):
        target.release(client.request_id)
    step(target, [Client("new", random_ids(20, seed=50))], no_block)
    again = [Client(f"again {i}", client.prompt) for i, client in enumerate(clients)]
    assert [step(target, [client], no_block).verdicts[0].cached for client in (again[0], again[2])] == [19, 19]
    target.release("new")
    assert step(target, [again[1]], no_block).verdicts[0].cached == 0
