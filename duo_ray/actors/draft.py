"""The draft's process: a llama.cpp model on cores of its own."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from duo_ray.actors import wire
from duo_ray.actors.node import check_room_here, find_here, node_id
from duo_ray.actors.passing_thread import in_passing_thread
from duo_ray.hardware.cores import give_way, pin
from duo_ray.models.catalog import resolve_draft
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.memory import ModelMemory, gguf_memory
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Strategy, TokenizerVocabulary, VocabularyMatch, chat_opening
from duo_ray.types import DraftBlock, DraftJob, DraftModel, DraftProbs, DuoRayError

_TIMED_STEPS = 5


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Everything a draft actor needs to build itself, also after a restart."""

    files: tuple[tuple[str, str], ...]
    """(quantisation, .gguf file) of the same model; all are loaded."""
    model: str
    """The model's name in the configuration, a local path in full; other nodes find it by that."""
    quant: str | None
    """models.draft.quant."""
    threads: int
    cores: tuple[int, ...]
    """Cores to run on; empty leaves the choice to the operating system."""
    max_context: int
    slots: int
    max_sequences: int
    vocabulary: str
    """models.draft.vocabulary: auto, or the name of a strategy."""
    warmup_steps: int
    node: str = ""
    """Ray's id of the node that `files` and `cores` are about."""
    unseen: bool = False
    """Whether nobody has looked at the node it runs on: what it takes is compared with what that has."""

    def memory(self) -> ModelMemory:
        """Bytes that its models will take together, from their files."""
        sizes = [self.memory_of(path) for _, path in self.files]
        together = {name: sum(getattr(size, name) for size in sizes) for name in ("weights", "per_token", "parameters")}
        return replace(sizes[0], **together)

    def memory_of(self, path: str) -> ModelMemory:
        """The same of one of the files."""
        return gguf_memory(read_gguf(Path(path)), tokens=self.max_context, slots=self.slots)

    def here(self) -> DraftSettings:
        """The same on the node this runs on: an actor may be placed, or come back, anywhere."""
        if self.node == node_id():
            return self
        # What auto has chosen among may be more, or made of something else, elsewhere.
        asked = [(quant, quant if self.quant == "auto" else self.quant) for quant, _ in self.files]
        files = tuple((quant, str(find_here(resolve_draft, self.model, wanted))) for quant, wanted in asked)
        return replace(self, files=files, cores=())


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
    """Of all quantisations together."""
    timings: dict[str, tuple[tuple[int, float], ...]]
    """For each quantisation, (sequences advanced together, seconds) of the warm-up decodes, per token of the target."""
    vocabulary: VocabularyMatch
    """How its tokens become the target's."""


class DraftActor:
    """Ray actor around a `LlamaCppDraft` for each quantisation, adapted to the target's tokens: one call at a time.

    Its only state is the models'.
    """

    def __init__(self, settings: DraftSettings) -> None:
        settings = settings.here()
        if settings.unseen:
            check_room_here("draft", settings.memory(), on_gpu=False)
        # Before llama.cpp starts its threads: they inherit the affinity.
        if settings.cores:
            pin(settings.cores)
        give_way()
        self._settings = settings
        self._busy = threading.Lock()  # actor calls and the socket's thread take turns
        self._models: dict[str, DraftModel] = {}
        self._info: DraftInfo | None = None
        in_passing_thread(self._load)

    def _load(self) -> None:
        from duo_ray.models.llama_cpp import LlamaCppDraft  # noqa: PLC0415 - the process is pinned first

        settings = self._settings
        self._drafts = {
            quant: LlamaCppDraft.load(
                path,
                threads=settings.threads,
                max_context=settings.max_context,
                slots=settings.slots,
                max_sequences=settings.max_sequences,
            )
            for quant, path in settings.files
        }
        for draft in self._drafts.values():
            draft.warm_up(settings.warmup_steps)

    def adapt(self, tokenizer: Tokenizer) -> DraftInfo:
        """Learn the target's tokens, before any job, and read what chats begin with; after a restart again.

        Raises:
            VocabularyError: the vocabularies do not allow what the configuration asks for.
        """
        with self._busy:
            if self._info is None:
                self._info = in_passing_thread(lambda: self._adapt(tokenizer))
            return self._info

    def _adapt(self, tokenizer: Tokenizer) -> DraftInfo:
        from duo_ray.models.translating import adapt  # noqa: PLC0415 - the process is pinned first

        # The target is loaded by now: beside that, decodes took up to twice as long.
        timings = {quant: draft.warm_up(_TIMED_STEPS) for quant, draft in self._drafts.items()}
        matches = {}
        wanted = self._settings.vocabulary
        for quant, draft in self._drafts.items():
            self._models[quant], matches[quant] = adapt(draft, tokenizer, wanted)
            wanted = matches[quant].strategy  # one for all: their blocks are judged alike
            same = wanted is Strategy.SAME
            opening = chat_opening(TokenizerVocabulary(tokenizer) if same else draft.vocabulary)
            draft.read(opening[: self._settings.max_context])
        return self._describe(matches, timings)

    def _describe(
        self, matches: Mapping[str, VocabularyMatch], measured: Mapping[str, Sequence[tuple[int, float]]]
    ) -> DraftInfo:
        first = next(iter(matches))
        return DraftInfo(
            pid=os.getpid(),
            node=node_id(),
            cores=self._settings.cores,
            vocab_size=self._models[first].vocab_size,
            max_context=self._models[first].max_context,
            memory_bytes=sum(draft.memory_bytes() for draft in self._drafts.values()),
            timings={
                quant: tuple((width, _decodes_per_token(matches[quant]) * seconds) for width, seconds in timings)
                for quant, timings in measured.items()
            },
            vocabulary=matches[first],
        )

    def draft(self, quant: str, jobs: Sequence[DraftJob]) -> tuple[list[DraftBlock], tuple[DraftProbs | None, ...]]:
        """Blocks for the coordinator and, as an object of its own that only the target reads, their probabilities."""
        with self._busy:
            if self._info is None:
                raise DuoRayError("the draft was not told the target's tokens: call adapt first")
            answers = self._models[quant].draft(jobs)
        return [block for block, _ in answers], tuple(probs for _, probs in answers)

    def abandon(self, request_id: str) -> None:
        """Read no further for this request in a call that the socket's thread is in; between nodes, do nothing."""
        for draft in self._drafts.values():
            draft.abandon(request_id)

    def release(self, request_id: str) -> None:
        with self._busy:
            for model in self._models.values():
                model.release(request_id)

    def listen(self) -> tuple[str, str]:
        """Open a socket that takes `draft` and `release`: (id of this node, its path)."""

        def draft(asked: tuple[str, Sequence[DraftJob]], _parts: wire.Parts) -> tuple[list[DraftBlock], wire.Parts]:
            blocks, probs = self.draft(*asked)
            return blocks, (pickle.dumps(probs),)

        path = wire.listen({"draft": draft}, {"release": self.release})
        return node_id(), path


def _decodes_per_token(match: VocabularyMatch) -> float:
    """Decodes for one token of the target, in a usual text."""
    return match.tokens_per_target_token if match.strategy is Strategy.STRING else 1.0
