"""Model actors without models: probability tables, a fixed time for each call, and a record of what was asked."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray

from duo_ray.actors import wire
from duo_ray.actors.coordinator import CoordinatorSettings
from duo_ray.actors.draft import DraftInfo
from duo_ray.actors.target import Judged, ProbsPick, Sent, TargetInfo, Timings, picked
from duo_ray.core.gamma import Policy
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, mixed_table, random_table
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Strategy, VocabularyMatch, VocabularyReport
from duo_ray.types import DraftBlock, DraftJob, DraftProbs, Span, TargetReply, VerifyJob

VOCAB = 16
CONTEXT = 400
TABLE = random_table(VOCAB, 1)


class _Recording:
    """What both actors have in common."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._busy = threading.Lock()
        self._calls: list[list[tuple[str, int]]] = []

    def calls(self) -> list[list[tuple[str, int]]]:
        """(request id, tokens) of every job, call by call, since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def held(self) -> set[str]:
        with self._busy:
            return self._model.held

    def release(self, request_id: str) -> None:
        with self._busy:
            self._model.release(request_id)

    def listen(self) -> tuple[str, str]:
        path = wire.listen({self._verb: self._answer}, {"release": self.release})
        return ray.get_runtime_context().get_node_id(), path

    def die(self) -> None:
        os._exit(1)


class ScriptedTargetActor(_Recording):
    """Stands in for `TargetActor`; a pass takes `seconds` and 1% more for every token."""

    _verb = "verify"

    def __init__(self, slots: int, seconds: float, once: str | None = None, seconds_alone: float | None = None) -> None:
        """Args:
        once: a file that says that it was started before; it then takes 20 seconds.
        seconds_alone: what a pass takes while no draft works, if that makes a difference.
        """
        super().__init__(seconds)
        self._seconds_alone = seconds_alone
        self._alone: list[bool] = []
        if once is not None and Path(once).exists():
            time.sleep(20.0)
        elif once is not None:
            Path(once).touch()
        self._model = ScriptedTarget(TABLE, VOCAB, max_context=CONTEXT, slots=slots)

    def describe(self) -> TargetInfo:
        timings = tuple((n, self._seconds * (1 + 0.01 * n)) for n in (1, 2, 4, 8, 16, 32))
        node = ray.get_runtime_context().get_node_id()
        return TargetInfo(os.getpid(), node, "cpu", "float64", (), CONTEXT, self._model.slots, 0, timings)

    def measure_alone(self) -> tuple[Timings, Timings]:
        if self._seconds_alone is None:
            return (), ()
        own, alone = (
            tuple((n, seconds * (1 + 0.01 * n)) for n in (1, 8)) for seconds in (self._seconds, self._seconds_alone)
        )
        return own, alone

    def alone(self) -> list[bool]:
        """Of every pass since the last time, whether no draft was said to work beside it."""
        found, self._alone = self._alone, []
        return found

    def verify(
        self,
        jobs: Sequence[VerifyJob],
        picks: Sequence[ProbsPick | None],
        alone: bool,
        *probs: Sent,
    ) -> TargetReply:
        with self._busy:
            self._calls.append([(job.context.request_id, len(job.context.ids) + len(job.block)) for job in jobs])
            self._alone.append(alone)
            reply = self._model.verify(jobs, picked(picks, probs))
            spreads = alone and self._seconds_alone is not None
            time.sleep(self._seconds_alone if spreads else self._seconds)
            return replace(reply, span=Span(reply.span.started, time.time()), alone=spreads)

    def _answer(self, argument: Judged, parts: wire.Parts) -> tuple[TargetReply, wire.Parts]:
        return self.verify(*argument, *parts), ()


class ScriptedDraftActor(_Recording):
    """Stands in for `DraftActor`: right in most cases, `seconds` for each token of the longest block."""

    _verb = "draft"

    def __init__(self, seconds: float, quants: Mapping[str, tuple[float, float]] | None = None) -> None:
        """`quants`: for each quantisation, a factor of `seconds` and how much of its table is not the target's."""
        super().__init__(seconds)
        self._abandoned: list[str] = []
        self._slowness = {"Q8_0": 1.0}
        self._models = {"Q8_0": _draft(0.2)}
        if quants is not None:
            self._slowness = {name: slowness for name, (slowness, _) in quants.items()}
            self._models = {name: _draft(other) for name, (_, other) in quants.items()}

    def held(self) -> set[str]:
        with self._busy:
            return {request_id for model in self._models.values() for request_id in model.held}

    def release(self, request_id: str) -> None:
        with self._busy:
            for model in self._models.values():
                model.release(request_id)

    def abandon(self, request_id: str) -> None:
        self._abandoned.append(request_id)

    def abandoned(self) -> list[str]:
        """Requests for which it was told to read no further."""
        return self._abandoned

    def adapt(self, _tokenizer: Tokenizer) -> DraftInfo:
        timings = {
            quant: tuple((width, slowness * self._seconds * (1 + 0.1 * width)) for width in (1, 2, 4))
            for quant, slowness in self._slowness.items()
        }
        same = VocabularyMatch(VocabularyReport(VOCAB, VOCAB, VOCAB, None, VOCAB, (), ()), Strategy.SAME, "one table")
        return DraftInfo(os.getpid(), ray.get_runtime_context().get_node_id(), (), VOCAB, CONTEXT, 0, timings, same)

    def draft(self, quant: str, jobs: Sequence[DraftJob]) -> tuple[list[DraftBlock], tuple[DraftProbs | None, ...]]:
        with self._busy:
            self._calls.append([(job.context.request_id, job.budget) for job in jobs])
            answers = self._models[quant].draft(jobs)
            time.sleep(self._slowness[quant] * self._seconds * max(job.budget for job in jobs))
        return [block for block, _ in answers], tuple(probs for _, probs in answers)

    def _answer(self, asked: tuple[str, Sequence[DraftJob]], _parts: wire.Parts) -> tuple[list[DraftBlock], wire.Parts]:
        blocks, probs = self.draft(*asked)
        return blocks, (pickle.dumps(probs),)


def _draft(other: float) -> ScriptedDraft:
    return ScriptedDraft(mixed_table(TABLE, random_table(VOCAB, 2), other), VOCAB, max_context=CONTEXT)


def coordinator_settings(tokenizer_path: Path) -> CoordinatorSettings:
    """Of a coordinator over these actors."""
    return CoordinatorSettings(
        tokenizer_path=str(tokenizer_path),
        vocab_size=49152,
        policy=Policy(),
        max_sequences=2,
        prefetch=True,
        chunk=64,
        calibration=None,
    )
