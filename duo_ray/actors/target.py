"""The target's process: a model in transformers or llama.cpp, on the GPU, or on CPU cores apart from the drafts'."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duo_ray.actors import wire
from duo_ray.actors.node import check_room_here, find_here, node_id
from duo_ray.actors.passing_thread import in_passing_thread
from duo_ray.core.context import IdLog
from duo_ray.core.stretch import draw_further
from duo_ray.hardware.cores import give_way, pin, pin_threads, threads_here
from duo_ray.hardware.pages import collapse_pages
from duo_ray.models.catalog import resolve_gguf_target, resolve_target
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.memory import ModelMemory, directory_memory, gguf_memory
from duo_ray.models.silence import silence_transformers
from duo_ray.types import DraftProbs, Ids, SamplingParams, TargetReply, VerifyJob

if TYPE_CHECKING:
    from duo_ray.models.llama_cpp_target import LlamaCppTarget
    from duo_ray.models.transformers import TransformersTarget

_ALONE_STEPS = 3


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Everything a target actor needs to build itself, also after a restart."""

    path: str
    """Directory that transformers loads, or the .gguf file that llama.cpp does."""
    engine: str
    """transformers or llama_cpp."""
    model: str
    """The model's name in the configuration, a local path in full; other nodes find it by that."""
    device: str
    dtype: str
    slots: int
    max_context: int
    vocab_size: int
    """Ids the tokenizer knows; the embedding may be padded beyond it."""
    threads: int | None
    cores: tuple[int, ...]
    attn_implementation: str
    chunk: int
    device_map: str | dict[str, int | str] | None
    cuda_graphs: bool
    quantization: str
    gpu_layers: int
    """Layers that llama.cpp computes on the GPU."""
    warmup_steps: int
    opening: Ids = ()
    """What chats begin with: in the cache before the first one."""
    repack: bool = False
    """Whether llama.cpp brings the weights into a layout for this CPU's vector units."""
    spare_cores: tuple[int, ...] = ()
    """Those of the drafts, or without one of the coordinator, for passes beside which no draft works."""
    node: str = ""
    """Ray's id of the node that `path` and the cores are about."""
    unseen: bool = False
    """Whether nobody has looked at the node it runs on: what it takes is compared with what that has."""

    def memory(self) -> ModelMemory:
        """Bytes that it will take, from its files."""
        path, room = Path(self.path), {"tokens": self.max_context, "slots": self.slots}
        if self.engine == "llama_cpp":
            return gguf_memory(read_gguf(path), **room)
        on_cpu = self.device == "cpu"
        return directory_memory(path, self.dtype, **room, packed=on_cpu, quantization=self.quantization)

    def here(self) -> TargetSettings:
        """The same on the node this runs on: an actor may be placed, or come back, anywhere."""
        if self.node == node_id():
            return self
        resolve = resolve_target if self.engine == "transformers" else resolve_gguf_target
        return replace(self, path=str(find_here(resolve, self.model).path), cores=(), spare_cores=())


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target actor says about itself."""

    pid: int
    node: str
    """Ray's id of the node it runs on."""
    device: str
    dtype: str
    """Precision of the computation; of a model in llama.cpp the type of its weights (Q4_1)."""
    cores: tuple[int, ...]
    max_context: int
    slots: int
    memory_bytes: int
    timings: tuple[tuple[int, float], ...]
    """(new tokens in a pass, seconds) of the warm-up passes."""
    engine: str = "transformers"


@dataclass(frozen=True, slots=True)
class ProbsPick:
    """Where a job's `DraftProbs` are among the objects sent beside the jobs."""

    argument: int
    entry: int


Timings = tuple[tuple[int, float], ...]
"""(new tokens in a pass, seconds)."""

Judged = tuple[Sequence[VerifyJob], Sequence[ProbsPick | None], bool]
"""Jobs, whose `DraftProbs` are where, and whether no draft works beside them."""
Sent = tuple[DraftProbs | None, ...] | bytes
"""What one draft call returned beside its blocks; bytes where it came over a socket."""


def picked(picks: Sequence[ProbsPick | None], sent: Sequence[Sent]) -> list[DraftProbs | None]:
    """The `DraftProbs` of each job."""
    read = [pickle.loads(each) if isinstance(each, bytes) else each for each in sent]
    return [None if pick is None else read[pick.argument][pick.entry] for pick in picks]


class TargetActor:
    """Ray actor around a `TargetModel`: one pass at a time, state only in the model."""

    def __init__(self, settings: TargetSettings) -> None:
        settings = settings.here()
        on_gpu = settings.device != "cpu"
        if settings.unseen and not (on_gpu and settings.engine == "llama_cpp"):  # which may leave layers on the host
            check_room_here("target", settings.memory(), on_gpu=on_gpu)
        self._settings = settings
        self._before = threads_here()
        if settings.cores:
            pin((*settings.cores, *settings.spare_cores))
        if settings.device == "cpu":
            give_way()
        self._busy = threading.Lock()  # actor calls and the socket's thread take turns
        self._alone: bool | None = None
        in_passing_thread(self._load)

    def _load(self) -> None:
        if self._settings.spare_cores:
            # OpenMP counts the cores it may use once, and with more threads than those all sleep at every barrier.
            import llama_cpp  # noqa: F401, PLC0415

            pin(self._settings.cores)
        self._model = load_target(self._settings)
        self._timings = tuple(self._model.warm_up(self._settings.warmup_steps))
        self._read_opening()

    def _read_opening(self) -> None:
        """Run what chats begin with, so that they run only what is new."""
        if ids := self._settings.opening[: self._model.max_context]:
            context = IdLog(ids).context("", agreed=0, prompt_length=len(ids))
            self._model.verify([VerifyJob(context, (), SamplingParams())], [None])
            self._model.release("")

    def describe(self) -> TargetInfo:
        return TargetInfo(
            pid=os.getpid(),
            node=node_id(),
            device=self._settings.device,
            dtype=self._settings.dtype,
            cores=self._settings.cores,
            max_context=self._model.max_context,
            slots=self._model.slots,
            memory_bytes=self._model.memory_bytes(),
            timings=self._timings,
            engine=self._settings.engine,
        )

    def measure_alone(self) -> tuple[Timings, Timings]:
        """Times of passes on one's own cores, and on the spare ones, too, which must be idle; only where there are any.

        Those on one's own were taken before, but while the drafts were being loaded. To be asked before the first
        request: what the cache holds for it is put back.
        """
        if not self._settings.spare_cores:
            return (), ()
        with self._busy:
            self._timings, alone = in_passing_thread(self._time_alone)
        return self._timings, alone

    def _time_alone(self) -> tuple[Timings, Timings]:
        self._spread(alone=False)
        own = tuple(self._model.warm_up(_ALONE_STEPS))
        self._spread(alone=True)
        alone = tuple(self._model.warm_up(_ALONE_STEPS))
        self._read_opening()
        self._alone = None  # the thread that serves is not bound yet
        return own, alone

    def _spread(self, *, alone: bool) -> None:
        """Compute on the drafts' cores, too, or on one's own."""
        settings = self._settings
        if alone is self._alone or not settings.spare_cores:
            return
        cores = (*settings.cores, *settings.spare_cores) if alone else settings.cores
        pin_threads(cores, threads_here() - self._before)  # not Ray's own
        model: Any = self._model  # in llama.cpp: others have no spare cores
        model.use_threads(len(cores))
        self._alone = alone

    def verify(
        self, jobs: Sequence[VerifyJob], picks: Sequence[ProbsPick | None], alone: bool, *probs: Sent
    ) -> TargetReply:
        """One pass, or several where the only job asks for further tokens.

        Args:
            picks: whose are which of `probs`.
            alone: no draft works beside it, so that their cores may be used.
            probs: what draft actors returned, handed on by reference.
        """
        with self._busy:
            self._spread(alone=alone)
            reply = self._model.verify(jobs, picked(picks, probs))
            if len(jobs) == 1 and jobs[0].further:
                reply = draw_further(self._model, jobs[0], reply)
            return replace(reply, alone=True) if self._alone else reply

    def release(self, request_id: str) -> None:
        with self._busy:
            self._model.release(request_id)

    def listen(self) -> tuple[str, str]:
        """Open a socket that takes `verify` and `release`: (id of this node, its path)."""

        def verify(argument: Judged, parts: wire.Parts) -> tuple[TargetReply, wire.Parts]:
            return self.verify(*argument, *parts), ()

        path = wire.listen({"verify": verify}, {"release": self.release})
        return node_id(), path


def load_target(settings: TargetSettings) -> LlamaCppTarget | TransformersTarget:
    """The model that these settings describe, in this process.

    Raises:
        DuoRayError, ValueError: it cannot be loaded.
    """
    return _load_llama_cpp(settings) if settings.engine == "llama_cpp" else _load_transformers(settings)


def _load_llama_cpp(settings: TargetSettings) -> LlamaCppTarget:
    from duo_ray.models.llama_cpp_target import LlamaCppTarget  # noqa: PLC0415 - the process is pinned first

    return LlamaCppTarget.load(
        settings.path,
        threads=len(settings.cores) if settings.spare_cores else settings.threads or 1,
        max_context=settings.max_context,
        slots=settings.slots,
        vocab_size=settings.vocab_size,
        gpu_layers=settings.gpu_layers,
        repack=settings.repack,
    )


def _load_transformers(settings: TargetSettings) -> TransformersTarget:
    silence_transformers()
    from duo_ray.models.transformers import TransformersTarget  # noqa: PLC0415 - the process is pinned first

    model = TransformersTarget.load(
        settings.path,
        device=settings.device,
        dtype=settings.dtype,
        slots=settings.slots,
        max_context=settings.max_context,
        vocab_size=settings.vocab_size,
        threads=settings.threads,
        attn_implementation=settings.attn_implementation,
        chunk=settings.chunk,
        device_map=settings.device_map,
        cuda_graphs=settings.cuda_graphs,
        quantization=settings.quantization,
    )
    if settings.device == "cpu":
        collapse_pages()
    return model
