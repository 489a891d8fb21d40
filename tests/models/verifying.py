"""The sending side of a target: requests that remember what they sent and what came back."""

from __future__ import annotations

import random
from collections.abc import Callable

from duo_ray.core.context import IdLog
from duo_ray.types import Ids, SamplingParams, TargetModel, TargetReply, Verdict, VerifyJob
from tests.models.tiny_transformers import VOCAB

GREEDY = SamplingParams(temperature=0.0)
SHAPED = SamplingParams(
    temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3, seed=11
)

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


def step(target: TargetModel, clients: list[Client], propose: Propose) -> TargetReply:
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
