"""The target in llama.cpp: what it emits is what llama.cpp alone would have written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as ll

from duo_ray.core import sampling
from duo_ray.core.context import IdLog
from duo_ray.models.llama_cpp_target import LlamaCppTarget
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.types import (
    ContextOverflow,
    DraftProbs,
    Ids,
    NonFiniteLogits,
    SamplingParams,
    TargetModel,
    TargetReply,
    UnknownPrefix,
    VerifyJob,
)
from tests.models.drafting import CONTEXT, GREEDY, PROMPT, SAMPLED, VOCAB, Reference, assert_greedy
from tests.models.tiny_gguf import write_tiny_llama, write_tiny_mamba

SLOTS = 3


class Client:
    """The sending side of one request."""

    def __init__(self, request_id: str, prompt: Ids, sampling: SamplingParams = GREEDY) -> None:
        self.request_id, self.prompt, self.sampling = request_id, prompt, sampling
        self.log, self.agreed = IdLog(prompt), 0

    @property
    def emitted(self) -> Ids:
        return tuple(self.log.ids[len(self.prompt) :])

    def job(self, block: Ids = (), *, chunk: int | None = None, reproducible: bool = False) -> VerifyJob:
        context = self.log.context(self.request_id, agreed=self.agreed, prompt_length=len(self.prompt))
        self.agreed = len(self.log)
        return VerifyJob(context, block, self.sampling, chunk=chunk, reproducible=reproducible)


def step(target: LlamaCppTarget, clients: list[Client], propose: Callable[[Client], Ids] = lambda _: ()) -> TargetReply:
    blocks = [propose(client) for client in clients]
    reply = target.verify([c.job(b) for c, b in zip(clients, blocks, strict=True)], [None] * len(clients))
    for client, block, verdict in zip(clients, blocks, reply.verdicts, strict=True):
        assert verdict.token is not None
        client.log.extend((*block[: verdict.accepted], verdict.token))
    return reply


def random_ids(count: int, seed: int) -> Ids:
    return tuple(np.random.default_rng(seed).integers(2, VOCAB, count).tolist())


@pytest.fixture
def target(tiny_path: Path) -> Iterator[LlamaCppTarget]:
    target = LlamaCppTarget.load(tiny_path, threads=1, max_context=CONTEXT, slots=SLOTS)
    yield target
    target.close()


def test_it_is_a_target_model(target: LlamaCppTarget) -> None:
    assert isinstance(target, TargetModel)
    assert (target.slots, target.max_context, target.vocab_size) == (SLOTS, CONTEXT, VOCAB)
    assert target.memory_bytes() > 0


def test_requests_of_different_lengths_with_good_and_bad_blocks_write_llama_cpps_greedy_text(
    target: LlamaCppTarget, reference: Reference
) -> None:
    rng = random.Random(0)

    def propose(client: Client) -> Ids:
        """Some right tokens, then some of any kind: most blocks are cut off somewhere in the middle."""
        ids = tuple(client.log.ids)
        for _ in range(rng.randrange(4)):
            ids = (*ids, int(reference.logits(ids).argmax()))
        return (*ids[len(client.log) :], *(rng.randrange(VOCAB) for _ in range(rng.randrange(4))))

    clients = [Client(f"{i}", random_ids(length, i)) for i, length in enumerate((5, 40, 90))]
    passes = 0
    while min(len(client.emitted) for client in clients) < 12:
        step(target, clients, propose)
        passes += 1
    assert passes < 12
    for client in clients:
        assert_greedy(reference, client.prompt, client.emitted)


def test_a_released_slot_serves_the_next_request(target: LlamaCppTarget, reference: Reference) -> None:
    for i in range(3 * SLOTS):
        client = Client(f"{i}", random_ids(20 + 7 * i, i))
        for _ in range(3):
            step(target, [client], lambda _: (5, 6, 7))
        assert_greedy(reference, client.prompt, client.emitted)
        target.release(client.request_id)


def test_a_request_cancelled_between_steps_leaves_the_others_as_they_were(
    target: LlamaCppTarget, reference: Reference
) -> None:
    kept, gone = Client("kept", PROMPT), Client("gone", random_ids(60, 1))
    step(target, [kept, gone], lambda _: (9, 8, 7))
    target.release("gone")
    fresh = Client("fresh", random_ids(33, 2))
    for _ in range(4):
        step(target, [kept, fresh], lambda _: (3, 4))
    for client in (kept, fresh):
        assert_greedy(reference, client.prompt, client.emitted)
    with pytest.raises(UnknownPrefix):
        target.verify([gone.job()], [None])


def test_a_prompt_in_chunks_beside_running_requests_gives_the_same_text(
    target: LlamaCppTarget, reference: Reference
) -> None:
    long, running = Client("long", random_ids(200, 3)), Client("running", PROMPT)
    passes = 0
    while True:
        reply = target.verify([long.job(chunk=48), running.job((4, 5))], [None, None])
        passes += 1
        first, second = reply.verdicts
        assert second.token is not None
        running.log.extend((*(4, 5)[: second.accepted], second.token))
        if first.token is not None:
            long.log.extend((first.token,))
            break
        assert reply.tokens <= 48 + 3 + len(PROMPT)
    assert passes == 5
    for client in (long, running):
        assert_greedy(reference, client.prompt, client.emitted)


def test_what_a_request_shares_with_another_is_not_run_again(target: LlamaCppTarget, reference: Reference) -> None:
    shared = random_ids(60, 4)
    first, second = Client("first", (*shared, 5)), Client("second", (*shared, 6, 7))
    step(target, [first])
    reply = step(target, [second])
    assert (reply.verdicts[0].cached, reply.tokens) == (60, 2)
    step(target, [first, second], lambda _: (3, 4))
    target.release("first")
    third = Client("third", (*shared, 8))
    assert step(target, [third]).verdicts[0].cached >= 60
    for client in (first, second, third):
        assert_greedy(reference, client.prompt, client.emitted)


def test_a_reproducible_request_takes_over_nothing_and_repeats_to_the_last_bit(target: LlamaCppTarget) -> None:
    shared = random_ids(60, 4)
    shown = []
    for before in (3, 40):
        other = Client("other", random_ids(before, 5))
        step(target, [other], lambda _: (3, 4, 5))
        target.release("other")
        client = Client("again", shared, SamplingParams(temperature=0.0, logprobs=1))
        verdict = target.verify([client.job((8, 9), reproducible=True)], [None]).verdicts[0]
        assert verdict.cached == 0
        shown.append(verdict)
        target.release("again")
    assert shown[0] == shown[1]


def test_sampled_tokens_are_drawn_from_llama_cpps_distribution(target: LlamaCppTarget, reference: Reference) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3)
    client = Client("a", PROMPT, params)
    for _ in range(10):
        step(target, [client])
    for i, token in enumerate(client.emitted):
        before = (*PROMPT, *client.emitted[:i])
        p = sampling.distribution(sampling.penalise(reference.logits(before), before, len(PROMPT), params), params)
        u = sampling.uniform(params.seed, len(before), sampling.Purpose.TOKEN)
        assert token == sampling.draw(p, u)


def test_a_drafted_token_is_judged_by_the_drafts_own_probability(target: LlamaCppTarget, reference: Reference) -> None:
    p = sampling.distribution(reference.logits(PROMPT), SAMPLED)
    likely, unlikely = int(p.argmax()), int(p.argmin())
    for token, kept in ((likely, 1), (unlikely, 0)):
        sure = DraftProbs((np.array([[token]], np.int32),), (np.array([[p[likely] / 2 if kept else 1.0]], np.float32),))
        verdict = target.verify([Client(f"{token}", PROMPT, SAMPLED).job((token,))], [sure]).verdicts[0]
        assert verdict.accepted == kept


def test_log_probabilities_are_those_of_the_model(target: LlamaCppTarget, reference: Reference) -> None:
    client = Client("a", PROMPT, SamplingParams(temperature=0.0, logprobs=3))
    verdict = step(target, [client]).verdicts[0]
    row = reference.logits(PROMPT).astype(np.float64)
    logs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    [shown] = verdict.logprobs
    assert shown.logprob == pytest.approx(logs.max(), abs=1e-2)
    assert [token for token, _ in shown.top] == np.argsort(-logs)[:3].tolist()


def test_padding_of_the_output_layer_is_never_emitted(tiny_path: Path, reference: Reference) -> None:
    best = int(reference.logits(PROMPT).argmax())
    small = LlamaCppTarget.load(tiny_path, threads=1, max_context=64, slots=1, vocab_size=best)
    verdict = small.verify([Client("a", tuple(t % best for t in PROMPT)).job()], [None]).verdicts[0]
    small.close()
    assert verdict.token is not None
    assert verdict.token < best


def test_more_than_the_context_holds_is_refused_and_changes_nothing(
    target: LlamaCppTarget, reference: Reference
) -> None:
    client = Client("a", random_ids(CONTEXT - 4, 5))
    step(target, [client], lambda _: (5, 6, 7, 8))
    with pytest.raises(ContextOverflow, match=f"exceed max_context={CONTEXT}"):
        target.verify([Client("b", random_ids(CONTEXT, 6)).job((5,))], [None])
    step(target, [client])
    assert_greedy(reference, client.prompt, client.emitted)


def test_full_slots_are_refused_by_number(target: LlamaCppTarget) -> None:
    for i in range(SLOTS):
        step(target, [Client(f"{i}", PROMPT)])
    with pytest.raises(ContextOverflow, match=f"only 0 of {SLOTS} slots are free"):
        target.verify([Client("more", PROMPT).job()], [None])


def test_every_slot_may_be_full_to_the_last_token(target: LlamaCppTarget, reference: Reference) -> None:
    clients = [Client(f"{i}", random_ids(CONTEXT - 9, i)) for i in range(SLOTS)]
    step(target, clients, lambda _: tuple(range(2, 10)))
    for client in clients:
        assert_greedy(reference, client.prompt, client.emitted)


def test_blocks_beyond_one_pass_are_judged_in_several(target: LlamaCppTarget, reference: Reference) -> None:
    clients = [Client(f"{i}", PROMPT) for i in range(SLOTS)]
    answer = PROMPT
    for _ in range(120):
        answer = (*answer, int(reference.logits(answer).argmax()))
    reply = step(target, clients, lambda _: answer[len(PROMPT) :])
    assert min(verdict.accepted for verdict in reply.verdicts) > 40
    for client in clients:
        assert_greedy(reference, PROMPT, client.emitted)


def test_a_failed_pass_is_repaired_by_sending_the_job_again(
    target: LlamaCppTarget, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client("a", PROMPT)
    step(target, [client], lambda _: (5, 6))
    with monkeypatch.context() as patch:
        patch.setattr(ll, "llama_decode", lambda *_: 2)
        with pytest.raises(LlamaCppError, match="failed with code 2"):
            target.verify([client.job((7, 8))], [None])
    for _ in range(3):
        step(target, [client], lambda _: (7, 8))
    assert_greedy(reference, PROMPT, client.emitted)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "nan.gguf", scale=float("nan"))
    target = LlamaCppTarget.load(path, threads=1, max_context=64, slots=1)
    with pytest.raises(NonFiniteLogits, match="request a"):
        target.verify([Client("a", PROMPT).job((5,))], [None])
    target.close()


def test_warm_up_times_passes_and_leaves_nothing_behind(target: LlamaCppTarget, reference: Reference) -> None:
    timings = dict(target.warm_up(2))
    assert list(timings) == [1, 2, 4, 8, 16, 32]
    assert min(timings.values()) > 0
    client = Client("a", tuple(range(2, 70)))
    assert step(target, [client]).verdicts[0].cached == 0
    assert_greedy(reference, client.prompt, client.emitted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"max_context": CONTEXT + 1}, f"was trained for {CONTEXT} tokens"),
    ],
)
def test_wrong_arguments_are_refused(tiny_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppTarget.load(tiny_path, **{"threads": 1, "max_context": 64, **arguments})


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match="cannot be a target, it is recurrent"):
        LlamaCppTarget.load(write_tiny_mamba(tmp_path / "mamba.gguf"), threads=1, max_context=64)


def test_layers_on_a_gpu_need_a_build_for_it(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ll, "llama_supports_gpu_offload", lambda: False)
    with pytest.raises(LlamaCppError, match="built without a GPU: CMAKE_ARGS=-DGGML_CUDA=on pip install"):
        LlamaCppTarget.load(tiny_path, threads=1, max_context=64, gpu_layers=4)


def test_a_closed_target_says_so(tiny_path: Path) -> None:
    target = LlamaCppTarget.load(tiny_path, threads=1, max_context=64)
    target.close()
    target.close()
    with pytest.raises(LlamaCppError, match="closed"):
        target.verify([Client("a", PROMPT).job()], [None])


def test_of_released_requests_the_latest_is_kept_and_little_beside_it(target: LlamaCppTarget) -> None:
    clients = [Client(f"{i}", random_ids(CONTEXT - 1, 10 + i)) for i in range(SLOTS)]
    step(target, clients)
    for client in clients:
        target.release(client.request_id)
    again = [Client(f"again {i}", client.prompt) for i, client in enumerate(clients)]
    assert [verdict.cached > 0 for verdict in step(target, again).verdicts] == [False, True, True]


def test_logits_along_a_text_are_those_of_single_steps(target: LlamaCppTarget, reference: Reference) -> None:
    ids = random_ids(40, 6)
    rows = [row.copy() for row in target.logits_along(ids, 3)]
    assert len(rows) == 3
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, reference.logits(ids[: 38 + i]), atol=2e-3)
