"""The target behind its seam: what it emits is what the model itself would have written."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from duo_ray.core import sampling as reference
from duo_ray.core.context import IdLog
from duo_ray.core.sampling import Purpose, uniform
from duo_ray.models.slot_cache import KV_CACHE_ATTENTION, Segment, SlotRunner
from duo_ray.models.torch_sampling import distribution
from duo_ray.models.transformers import TransformersTarget, UnsupportedModel, check_config
from duo_ray.types import (
    Context,
    ContextOverflow,
    DraftProbs,
    Ids,
    NonFiniteLogits,
    SamplingParams,
    TargetModel,
    TargetReply,
    UnknownPrefix,
    Verdict,
    VerifyJob,
)
from tests.models import flash_reference
from tests.models.tiny_transformers import CONFIGS, MAX_POSITIONS, VOCAB, own_greedy, own_logits, tiny_model

GREEDY = SamplingParams(temperature=0.0)
Propose = Callable[[list[int]], Ids]
"""Ids of a request so far -> the block to verify next."""


class Client:
    """The sending side of one request: its committed ids, and how many of them the target has seen."""

    def __init__(self, request_id: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
        self.request_id, self.prompt, self.sampling = request_id, prompt, sampling
        self.log = IdLog(prompt)
        self.agreed = 0
        self.accepted: list[int] = []

    @property
    def emitted(self) -> list[int]:
        return self.log.ids[len(self.prompt) :]

    def job(self, block: Ids = (), *, chunk: int | None = None) -> VerifyJob:
        context = self.log.context(self.request_id, agreed=self.agreed, prompt_length=len(self.prompt))
        self.agreed = len(self.log)
        return VerifyJob(context, block, self.sampling, chunk=chunk)

    def take(self, verdict: Verdict, block: Ids) -> None:
        assert verdict.request_id == self.request_id
        assert verdict.token is not None
        self.accepted.append(verdict.accepted)
        self.log.extend((*block[: verdict.accepted], verdict.token))


def step(target: TransformersTarget, clients: list[Client], propose: Propose) -> TargetReply:
    blocks = [propose(client.log.ids) for client in clients]
    reply = target.verify([c.job(b) for c, b in zip(clients, blocks, strict=True)], [None] * len(clients))
    for client, verdict, block in zip(clients, reply.verdicts, blocks, strict=True):
        client.take(verdict, block)
    return reply


def random_ids(count: int, seed: int) -> list[int]:
    return [random.Random(seed + i).randrange(VOCAB) for i in range(count)]


def no_block(ids: list[int]) -> Ids:
    return ()


def random_blocks(seed: int) -> Propose:
    rng = random.Random(seed)
    return lambda _: tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 8)))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, TransformersTarget]:
    """A model, and a target over another copy of it."""
    return tiny_model(request.param), TransformersTarget(tiny_model(request.param), slots=3, max_context=200, chunk=16)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model("llama"), slots=3, max_context=120)


# --- greedy -----------------------------------------------------------------------------------------------------


def test_random_blocks_leave_greedy_output_unchanged(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    client = Client("a", random_ids(40, seed=0))  # longer than the window and than a chunk
    while len(client.emitted) < 24:
        step(target, [client], random_blocks(len(client.emitted)))
    target.release("a")
    assert client.emitted[:24] == own_greedy(model, client.prompt, 24)


def test_blocks_that_go_wrong_in_the_middle_leave_greedy_output_unchanged(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    client = Client("a", random_ids(30, seed=1))
    answer = own_greedy(model, client.prompt, 48)
    rng = random.Random(2)

    def corrupted(ids: list[int]) -> Ids:
        block = answer[len(ids) - 30 :][:10]
        wrong = rng.randrange(len(block))
        return tuple((token + 1) % VOCAB if i >= wrong else token for i, token in enumerate(block))

    while len(client.emitted) < 24:
        step(target, [client], corrupted)
    target.release("a")
    assert client.emitted == answer[: len(client.emitted)]
    assert sum(client.accepted) > 0


def test_a_model_drafting_for_itself_is_accepted_entirely(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    client = Client("a", random_ids(20, seed=3))
    answer = own_greedy(model, client.prompt, 25)
    for _ in range(5):
        step(target, [client], lambda ids: tuple(answer[len(ids) - 20 :][:4]))
    target.release("a")
    assert client.accepted == [4] * 5
    assert client.emitted == answer


def test_requests_of_mixed_lengths_share_passes_and_reuse_slots(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    waiting = [Client(str(i), random_ids(length, seed=i)) for i, length in enumerate((5, 50, 33, 7, 61, 18))]
    clients = list(waiting)
    active: list[Client] = []
    while waiting or active:
        while waiting and len(active) < 3:
            active.append(waiting.pop(0))
        step(target, active, random_blocks(len(waiting)))
        for client in [c for c in active if len(c.emitted) >= 12]:
            target.release(client.request_id)
            active.remove(client)
    for client in clients:
        assert client.emitted[:12] == own_greedy(model, client.prompt, 12)


def test_crops_beyond_the_window_are_exact(pair: tuple[Any, TransformersTarget]) -> None:
    model, target = pair
    ids = random_ids(90, seed=5)
    context = IdLog(ids).context("a", agreed=0, prompt_length=1)
    target.verify([VerifyJob(context, (), GREEDY)], [None])
    back = IdLog(ids[:35]).context("a", agreed=35, prompt_length=1, extra=(3, 1, 4))  # 55 ids are given up
    (verdict,) = target.verify([VerifyJob(back, (), GREEDY)], [None]).verdicts
    target.release("a")
    assert verdict.token == int(own_logits(model, [*ids[:35], 3, 1, 4])[-1].argmax())


# --- sampling ---------------------------------------------------------------------------------------------------

SHAPED = SamplingParams(
    temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3, seed=11
)


@pytest.mark.parametrize(
    "params", [SHAPED, SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1)]
)
def test_picked_blocks_leave_sampled_output_unchanged(params: SamplingParams, target: TransformersTarget) -> None:
    plain = Client("plain", random_ids(12, seed=6), params)
    while len(plain.emitted) < 40:
        step(target, [plain], no_block)
    drafted = Client("drafted", plain.prompt, params)

    def half_right(ids: list[int]) -> Ids:
        right = plain.log.ids[len(ids) :][:3]
        return (*right, *random_ids(3, seed=len(ids)))

    while len(drafted.emitted) < 40:
        step(target, [drafted], half_right)
    assert drafted.emitted[:40] == plain.emitted[:40]
    assert max(drafted.accepted) >= 3


def test_the_random_number_of_a_token_is_that_of_its_position(llama: Any, target: TransformersTarget) -> None:
    for seed in range(20):
        params = SamplingParams(temperature=1.5, seed=seed)
        client = Client(str(seed), random_ids(12, seed=seed), params)
        step(target, [client], no_block)
        target.release(client.request_id)
        probs = reference.distribution(own_logits(llama, client.prompt)[-1].numpy(), params)
        assert client.emitted == [reference.draw(probs, uniform(seed, 12, Purpose.TOKEN))]


def test_a_sampled_draft_that_is_the_target_is_accepted_entirely(llama: Any, target: TransformersTarget) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    rng = np.random.default_rng(0)
    client = Client("a", random_ids(12, seed=7), params)
    for _ in range(6):
        ids, rows = list(client.log.ids), []
        for _ in range(5):
            rows.append(distribution(own_logits(llama, ids)[-1:], params)[0].numpy())
            ids.append(int(rng.choice(VOCAB, p=rows[-1])))
        block = tuple(ids[len(client.log) :])
        columns = np.tile(np.arange(VOCAB, dtype=np.int32), (5, 1))
        q = DraftProbs((columns,), (np.stack(rows).astype(np.float32),))
        client.take(target.verify([client.job(block)], [q]).verdicts[0], block)
    assert client.accepted == [5] * 6


def test_sequence_and_offset_choose_the_rows_of_q(target: TransformersTarget) -> None:
    ids = random_ids(10, seed=8)
    context = IdLog(ids).context("a", agreed=0, prompt_length=10)
    params = SamplingParams(temperature=1.0)
    # Almost no token survives q = 1 on itself; with q = 0 on the drafted token every one does.
    certain, absent = np.array([[5], [6], [7]]), np.array([[1], [1], [1]])
    q = DraftProbs((certain.astype(np.int32), absent.astype(np.int32)), (np.ones((3, 1), np.float32),) * 2)
    block = (6, 7)
    (kept,) = target.verify([VerifyJob(context, block, params, sequence=1, offset=1)], [q]).verdicts
    (judged,) = target.verify([VerifyJob(context, block, params, sequence=0, offset=1)], [q]).verdicts
    assert kept.accepted == 2
    assert judged.accepted < 2


def test_lossy_acceptance_keeps_what_is_among_the_most_probable(llama: Any, target: TransformersTarget) -> None:
    ids = random_ids(10, seed=9)
    second, third = own_logits(llama, ids)[-1].topk(3).indices[1:].tolist()
    context = IdLog(ids).context("a", agreed=0, prompt_length=10)
    lossy = SamplingParams(temperature=0.0, acceptance_top_k=2)
    assert target.verify([VerifyJob(context, (second,), lossy)], [None]).verdicts[0].accepted == 1
    assert target.verify([VerifyJob(context, (third,), lossy)], [None]).verdicts[0].accepted == 0


def test_padding_ids_are_never_emitted(llama: Any) -> None:
    prompt = random_ids(12, seed=10)
    narrow = max(own_greedy(llama, prompt, 30))  # the model itself would emit this id
    target = TransformersTarget(tiny_model("llama"), vocab_size=narrow, max_context=120)
    assert target.vocab_size == narrow
    prompt = [token % narrow for token in prompt]
    for params in (GREEDY, SamplingParams(temperature=2.0), SamplingParams(temperature=0.0, logprobs=3)):
        client = Client(str(params), prompt, params)
        for _ in range(60):
            step(target, [client], no_block)
        assert max(client.emitted) < narrow


def test_logprobs_are_the_models_own_for_every_emitted_token(llama: Any, target: TransformersTarget) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=4)
    client = Client("a", random_ids(12, seed=11), params)
    entries = []
    for seed in range(8):
        reply = step(target, [client], random_blocks(seed))
        entries += reply.verdicts[0].logprobs
    logs = own_logits(llama, client.log.ids).log_softmax(-1)[11:-1]
    assert len(entries) == len(client.emitted)
    for entry, row, token in zip(entries, logs, client.emitted, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(4).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


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


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, llama: Any) -> Iterator[Path]:
    llama.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_directory_of_safetensors_loads_in_any_dtype(dtype: str, saved: Path, llama: Any) -> None:
    target = TransformersTarget.load(saved, dtype=dtype, threads=1, max_context=100)
    client = Client("a", random_ids(20, seed=19))
    token = step(target, [client], no_block).verdicts[0].token
    logits = own_logits(deepcopy(llama).to(getattr(torch, dtype)), client.prompt)[-1]
    assert token == int(logits.argmax())
    assert torch.get_num_threads() == 1


def test_a_device_map_is_followed(saved: Path, llama: Any) -> None:
    target = TransformersTarget.load(saved, device_map={"": "cpu"}, max_context=100)
    client = Client("a", random_ids(20, seed=20))
    step(target, [client], random_blocks(0))
    assert client.emitted[0] == own_greedy(llama, client.prompt, 1)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of float32, bfloat16, float16"),
        ({"attn_implementation": "flash"}, "'flash' is none of sdpa, eager and flash_attention_2"),
        ({"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}, "device='cpu'.* CUDA devices .* use sdpa"),
        ({"max_context": MAX_POSITIONS + 1}, f"max_context={MAX_POSITIONS + 1} is out of range: 1 to {MAX_POSITIONS}"),
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1 must be at least 1"),
    ],
)
def test_an_argument_out_of_range_is_named(options: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersTarget.load(saved, **options)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(), "mamba cannot be a target: .*linear_attention"),
        (JambaConfig(), "jamba cannot be a target: .*linear_attention"),
        (RecurrentGemmaConfig(), "recurrent_gemma cannot be a target: .*linear_attention"),
        (Llama4TextConfig(), "llama4_text cannot be a target: .*chunked_attention"),
        (T5Config(), "t5 cannot be a target: it is an encoder-decoder"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "RoPE type dynamic"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 1024,
                    "short_factor": [1.0] * 64,
                    "long_factor": [2.0] * 64,
                }
            ),
            "RoPE type longrope",
        ),
    ],
)
def test_architectures_that_cannot_be_cropped_are_refused(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(config)


def test_a_recurrent_model_is_refused_even_when_its_config_is_silent() -> None:
    model = tiny_model("llama")
    model._is_stateful = True
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        TransformersTarget(model)


def test_a_refused_architecture_is_not_even_read(tmp_path: Path) -> None:
    MambaConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)  # and no weights
    with pytest.raises(UnsupportedModel, match="mamba"):
        TransformersTarget.load(tmp_path)


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(positions: torch.Tensor, keys: int, windows: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*positions.shape[:1], 1, positions.shape[1], keys, dtype=dtype)

    monkeypatch.setattr("duo_ray.models.slot_cache.attention_masks", everything)
    with pytest.raises(UnsupportedModel, match="off by"):
        TransformersTarget(tiny_model("llama"))


def test_a_model_that_needs_what_slots_cannot_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model.model).forward

    def without_positions(self: Any, *args: Any, position_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(self, *args, **rest)

    monkeypatch.setattr(type(model.model), "forward", without_positions)
    with pytest.raises(UnsupportedModel, match="trial run"):
        TransformersTarget(model)


def test_weights_that_are_broken_on_disk_are_reported_at_load() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLogits):
        TransformersTarget(model)


# --- measurements -----------------------------------------------------------------------------------------------


def test_warm_up_times_passes_of_growing_width(target: TransformersTarget) -> None:
    timings = target.warm_up(steps=2)
    assert [n for n, _ in timings] == [1, 2, 4, 8, 16, 32]
    assert all(seconds > 0 for _, seconds in timings)


def test_warm_up_stays_within_the_context() -> None:
    target = TransformersTarget(tiny_model("llama"), max_context=20)
    assert [n for n, _ in target.warm_up(steps=1)] == [1, 2, 4, 8]


def test_warm_up_needs_a_free_slot(target: TransformersTarget) -> None:
    step(target, [Client(str(i), [1, 2]) for i in range(3)], no_block)
    with pytest.raises(ContextOverflow, match="all 3 slots"):
        target.warm_up()


@pytest.mark.parametrize("packed", [False, True])
def test_memory_counts_weights_once_and_the_whole_buffer(packed: bool) -> None:
    model = tiny_model("llama")
    weights = sum(p.nbytes for p in model.parameters())
    output_layer = model.lm_head.weight.nbytes  # tied: its prepacked copy comes on top of the embedding
    target = TransformersTarget(model, slots=2, max_context=100, packed=packed)
    buffer = 3 * 2 * 2 * 2 * 128 * 12 * 4  # layers x (K, V) x slots x KV heads x columns x head size x bytes
    rotary = sum(b.nbytes for b in model.buffers())
    assert target.memory_bytes() == weights + rotary + buffer + (output_layer if packed else 0)


# --- FlashAttention 2 -------------------------------------------------------------------------------------------


def test_verdicts_by_flash_attention_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_reference)
    target = TransformersTarget(tiny_model("llama"), slots=3, max_context=200, flash_attention=True)
    clients = [Client(str(i), random_ids(n, seed=n)) for i, n in enumerate((5, 40, 150))]
    for i in range(8):
        step(target, clients[: 1 + i % 3], random_blocks(i))
    for client in clients:
        assert client.emitted == own_greedy(llama, client.prompt, len(client.emitted))


def test_a_model_without_flash_attention_is_refused_by_name() -> None:
    model = tiny_model("llama")
    model._supports_flash_attn = False
    with pytest.raises(UnsupportedModel, match=r"llama cannot be a target: .*FlashAttention 2.*sdpa"):
        TransformersTarget(model, flash_attention=True)


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3-window", "gpt2"])
def test_captured_passes_give_the_verdicts_of_uncaptured_ones(name: str) -> None:
    clients = []
    for graphs in (False, True):
        target = TransformersTarget(tiny_model(name).cuda(), slots=3, max_context=200, cuda_graphs=graphs)
        clients.append([Client(str(i), random_ids(n, seed=n), SHAPED) for i, n in enumerate((5, 40, 70))])
        for i in range(20):
            step(target, clients[-1][: 1 + i % 3], random_blocks(i))
    for plain, captured in zip(*clients, strict=True):
        assert captured.emitted == plain.emitted


@pytest.mark.gpu("flash_attn")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_the_package_flash_attn_gives_the_logits_of_eager_attention(name: str, graphs: bool) -> None:
    model = tiny_model(name, "eager", sharpness=1.0).to("cuda", torch.bfloat16)
    ids = [random_ids(n, seed=n) for n in (60, 33)]
    want = [own_logits(model, row).float() for row in ids]
    model.set_attn_implementation(KV_CACHE_ATTENTION)
    runner = SlotRunner(model, slots=4, max_context=200, graphs=graphs)
    with torch.inference_mode():
        runner.forward([Segment(0, 0, ids[0][:50], 1), Segment(3, 0, ids[1][:30], 1)])
        got = runner.forward([Segment(0, 50, ids[0][50:], 10), Segment(3, 30, ids[1][30:], 3)]).float()
    for row, count in enumerate((10, 3)):
        off = (got[row, :count] - want[row][-count:]).norm() / want[row][-count:].norm()
        assert off < 0.05
