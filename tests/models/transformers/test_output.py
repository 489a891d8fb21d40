"""What the target emits is what the model itself would have written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from duo_ray.core import sampling as reference
from duo_ray.core.context import IdLog
from duo_ray.core.sampling import Purpose, uniform
from duo_ray.models.torch_sampling import distribution
from duo_ray.models.transformers import TransformersTarget
from duo_ray.types import (
    ContextOverflow,
    DraftProbs,
    Ids,
    SamplingParams,
    VerifyJob,
)
from tests.models.tiny_transformers import VOCAB, own_greedy, own_logits, tiny_model
from tests.models.verifying import GREEDY, SHAPED, Client, no_block, random_blocks, random_ids, step

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


def test_logits_along_a_text_are_the_models_own_whatever_the_chunks() -> None:
    model = tiny_model("llama")
    ids = random_ids(23, seed=3)
    want = own_logits(model, ids).detach().numpy()[-10:]
    target = TransformersTarget(model, slots=1, max_context=64, packed=False, chunk=8)
    for _ in range(2):  # what the first time left in the slot is of no consequence
        found = np.array(list(target.logits_along(ids, 10)))
        assert np.allclose(found, want, atol=1e-4)
    with pytest.raises(ContextOverflow, match="65 ids"):
        next(target.logits_along([1] * 65, 1))
