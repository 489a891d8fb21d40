"""The draft's process: a llama.cpp model on cores of its own."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from duo_ray import hardware
from duo_ray.actors import wire
from duo_ray.types import DraftBlock, DraftJob, DraftProbs

_SAMPLE = 512
"""Tokens compared with the target's tokenizer: two vocabularies of different making differ almost everywhere."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Everything a draft actor needs to build itself, also after a restart."""

    path: str
    threads: int
    cores: tuple[int, ...]
    """Cores to run on; empty leaves the choice to the operating system (another node's cores are not ours to number).
    """
    max_context: int
    slots: int
    max_sequences: int
    vocab_size: int
    """Ids the target's tokenizer knows; the draft proposes no other."""
    warmup_steps: int


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What a draft actor says about itself."""

    pid: int
    node: str
    """Ray's id of the node it runs on."""
    cores: tuple[int, ...]
    vocab_size: int
    max_context: int
    memory_bytes: int
    timings: tuple[tuple[int, float], ...]
    """(sequences advanced together, seconds) of the warm-up decodes."""
    vocabulary_sample: tuple[tuple[int, str], ...]
    """(id, text) of some tokens, to compare with the target's."""


class DraftActor:
    """Ray actor around `LlamaCppDraft`: one call at a time, state only in the model."""

    def __init__(self, settings: DraftSettings) -> None:
        # Before llama.cpp starts its threads: they inherit the affinity.
        if settings.cores:
            hardware.pin(settings.cores)
        from duo_ray.models.llama_cpp import LlamaCppDraft  # noqa: PLC0415 - the process is pinned first

        self._settings = settings
        self._busy = threading.Lock()  # actor calls and the socket's thread take turns
        self._model = LlamaCppDraft.load(
            settings.path,
            threads=settings.threads,
            max_context=settings.max_context,
            slots=settings.slots,
            max_sequences=settings.max_sequences,
            vocab_size=settings.vocab_size,
        )
        self._timings = tuple(self._model.warm_up(settings.warmup_steps))

    def describe(self) -> DraftInfo:
        return DraftInfo(
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            cores=self._settings.cores,
            vocab_size=self._model.vocab_size,
            max_context=self._model.max_context,
            memory_bytes=self._model.memory_bytes(),
            timings=self._timings,
            vocabulary_sample=tuple(self._model.vocabulary_sample(_SAMPLE)),
        )

    def draft(self, jobs: Sequence[DraftJob]) -> tuple[list[DraftBlock], tuple[DraftProbs | None, ...]]:
        """Blocks for the coordinator and, as an object of its own that only the target reads, their probabilities."""
        with self._busy:
            answers = self._model.draft(jobs)
        return [block for block, _ in answers], tuple(probs for _, probs in answers)

    def release(self, request_id: str) -> None:
        with self._busy:
            self._model.release(request_id)

    def listen(self) -> tuple[str, str]:
        """Open a socket that takes `draft` and `release`: (id of this node, its path)."""

        def draft(jobs: Sequence[DraftJob], _parts: wire.Parts) -> tuple[list[DraftBlock], wire.Parts]:
            blocks, probs = self.draft(jobs)
            return blocks, (pickle.dumps(probs),)

        path = wire.listen({"draft": draft}, {"release": self.release})
        return ray.get_runtime_context().get_node_id(), path
