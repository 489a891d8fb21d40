"""Our own engine's methods: schedules over one target and one draft process, and other placements of the two.

All schedules share the model processes of one pipeline, each through a coordinator of its own: the same weights, the
same caches, nothing differs but the loop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.measured import Turn, cpu_seconds, peak_memory
from duo_ray.actors.coordinator import Coordinator, PipelineInfo
from duo_ray.actors.draft import DraftActor
from duo_ray.actors.launch import new_request_id
from duo_ray.actors.node import node_id
from duo_ray.actors.target import TargetActor
from duo_ray.config import Config
from duo_ray.session import Duo
from duo_ray.types import Delta, DuoRayError, Finished, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Variant:
    """What a method changes of the full system."""

    about: str
    draft: bool = True
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `core.gamma.Policy`."""
    max_sequences: int | None = None
    place: str = "apart"
    """apart: target and draft on cores of their own; all-cores: the target alone on all; shared: the draft on the
    target's cores."""


VARIANTS: dict[str, Variant] = {
    "target": Variant("the target alone, on the cores it has beside a draft (in llama.cpp on all)", draft=False),
    "target-all-cores": Variant("the target alone, on all cores", draft=False, place="all-cores"),
    "sequential": Variant("draft, then verify: conventional speculative decoding", policy={"overlap": False}),
    "duo": Variant("all of it"),
    **{f"gamma-{n}": Variant(f"gamma fixed at {n}", policy={"draft_budget": n}) for n in (4, 8, 16, 24)},
    "lead-0": Variant("no lead: the published loop", policy={"lead": 0}),
    "one-sequence": Variant("one sequence a block", max_sequences=1),
    "no-fallback": Variant("drafts also where it does not pay", policy={"fallback": False}),
    "shared-cores": Variant("the draft on the target's cores", place="shared"),
}


class Engine:
    """A running pipeline and a coordinator for every variant asked for."""

    def __init__(self, config: Config, names: Sequence[str], progress: Any) -> None:
        """Raises `DuoRayError` when the pipeline cannot start."""
        if os.environ.get("RAY_ADDRESS"):
            raise DuoRayError("processes are measured on this machine only: unset RAY_ADDRESS")
        self._cleanup = ExitStack()
        on_terminate = signal.getsignal(signal.SIGTERM)  # Ray puts its own there, which ends the process at once
        try:
            self.duo = self._cleanup.enter_context(Duo(config, progress=progress))
            signal.signal(signal.SIGTERM, on_terminate)
            self.methods = {name: self._method(VARIANTS[name]) for name in names}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._cleanup.close()

    def _method(self, variant: Variant) -> OwnMethod:
        settings, pipeline = self.duo.prepared.settings, self.duo.pipeline
        target, drafts = pipeline.target, list(pipeline.drafts) if variant.draft else []
        cores = tuple(sorted({*settings.target.cores, *(core for draft in settings.drafts for core in draft.cores)}))
        here = node_id()  # whose core numbers these are; actors elsewhere would not pin themselves
        if variant.place == "all-cores":
            target = self._actor(TargetActor, replace(settings.target, node=here, cores=cores, threads=len(cores)))
        elif variant.place == "shared":
            own = settings.target.cores
            drafts = [self._actor(DraftActor, replace(settings.drafts[0], node=here, cores=own, threads=len(own)))]
        loop = replace(settings.coordinator, policy=replace(settings.coordinator.policy, **variant.policy))
        coordinator = self._actor(Coordinator, loop, target, drafts, max_concurrency=100)
        info: PipelineInfo = ray.get(coordinator.start.remote())
        return OwnMethod(coordinator, info, variant)

    def _actor(self, kind: type, *arguments: Any, **options: Any) -> ActorHandle:
        handle = ray.remote(kind).options(num_cpus=0, **options).remote(*arguments)
        self._cleanup.callback(ray.kill, handle)
        return handle


class OwnMethod:
    """A `Method` through one coordinator."""

    def __init__(self, coordinator: ActorHandle, info: PipelineInfo, variant: Variant) -> None:
        self.info = info
        self._coordinator, self._variant = coordinator, variant
        self._processes = {
            "target": info.target.pid,
            **{f"draft-{i}": draft.pid for i, draft in enumerate(info.drafts)},
            "coordinator": info.coordinator_pid,
        }

    def generate(self, ids: Sequence[int], max_tokens: int, *, trace: bool = False) -> Turn:
        request = Request(
            request_id=new_request_id(),
            prompt=tuple(ids),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            draft=self._variant.draft,
            max_sequences=self._variant.max_sequences,
            trace=trace,
        )
        pids = [*self._processes.values(), os.getpid()]
        before = cpu_seconds(pids)
        tokens: list[int] = []
        at: list[float] = []
        began = time.perf_counter()
        for reference in self._coordinator.generate.remote(request):
            item: Delta | Finished = ray.get(reference)
            now = time.perf_counter() - began
            if isinstance(item, Finished):
                events = tuple(
                    {"actor": e.actor, "name": e.name, "from": e.span.started, "to": e.span.ended} for e in item.trace
                )
                used = cpu_seconds(pids) - before
                return Turn(len(ids), tuple(tokens), tuple(at), used, item.stats, events)
            tokens += [token.id for token in item.tokens]
            at += [now] * len(item.tokens)
        raise DuoRayError("the stream ended without its end")

    def between(self) -> None:
        # One short prompt for each slot, none like another: they push out what the caches kept.
        for number in range(self.info.target.slots):
            self.generate((1 + number, 2, 3), 1)

    def pipeline(self) -> PipelineInfo:
        """What runs, with the loop's estimates as they are now."""
        info: PipelineInfo = ray.get(self._coordinator.describe.remote())
        return info

    def peak_bytes(self) -> dict[str, int]:
        return {name: peak_memory(pid) for name, pid in self._processes.items()}

    def describe(self) -> str:
        target = self.info.target
        return f"{self._variant.about}; target {target.dtype} on {target.device}, cores {list(target.cores)}"
